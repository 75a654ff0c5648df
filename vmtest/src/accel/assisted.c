/*
 * For a QEMU whose guest runs under a software-assisted KVM: puts right what QEMU does not know of such a vCPU when it has set its
 * registers. Compiled with -DARM=..., the value of the MSR that switches native execution of ring 0 on.
 *
 * 1. That MSR is none of QEMU's state: a vCPU that was loaded has not got it. It is written only where its bit 0 is not set; other
 *    bits are the host's.
 * 2. This guest's kernel runs on with user mode's selectors when it has returned from a trap to itself, and the host knows better as
 *    long as nobody sets registers. When they are set, it takes such a vCPU for one in user mode: one that was in HLT then
 *    sleeps for ever, with its timer's interrupt pending. The instruction pointer says which it is.
 * 3. The host does not tell QEMU that its vCPUs have AVX, and cannot hide it from the guest, which asks the processor itself and uses it.
 *    So QEMU read vector registers without their upper halves at each save, and put zeros there when the VM went on: a process that
 *    was copying memory just then copied zeros. What the host can keep (CPUID leaf 13), QEMU is told of.
 */
#define _GNU_SOURCE
#include <linux/kvm.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MSR_NATIVE 0x4b564d10
#define NATIVE 1ull
#define EFER_LMA 0x400ull
#define KERNEL_CS 0x10
#define KERNEL_DS 0x18
#define FDS 65536
/* CPUID: leaf 1, ECX; leaf 7, EBX; leaf 13, EAX. */
#define XSAVE_AND_AVX (1u << 26 | 1u << 28)
#define AVX2 (1u << 5)
#define AVX512 (1u << 16)
#define KEEPS_AVX 0x4u
#define KEEPS_AVX512 0xe0u

enum { OTHER, VCPU, WAS_SET };
static unsigned char kinds[FDS];

static long call(int fd, unsigned int request, void *argument) { return syscall(SYS_ioctl, fd, (unsigned long)request, argument); }

static void put_right(int fd)
{
    struct kvm_sregs special;
    struct kvm_regs general;
    struct { struct kvm_msrs head; struct kvm_msr_entry entry; } msr;

    if (call(fd, KVM_GET_SREGS, &special) || call(fd, KVM_GET_REGS, &general) || !(special.efer & EFER_LMA))
        return;
    if ((general.rip >> 63) && special.cs.dpl != 0) {
        special.cs.selector = KERNEL_CS;
        special.ss.selector = KERNEL_DS;
        special.cs.dpl = special.ss.dpl = 0;
        call(fd, KVM_SET_SREGS, &special);
    }
    memset(&msr, 0, sizeof msr);
    msr.head.nmsrs = 1;
    msr.entry.index = MSR_NATIVE;
    if (call(fd, KVM_GET_MSRS, &msr) != 1 || (msr.entry.data & NATIVE))
        return;
    msr.entry.data = ARM;
    call(fd, KVM_SET_MSRS, &msr);
}

static void tell_of_vectors(struct kvm_cpuid2 *told)
{
    struct kvm_cpuid_entry2 *entry;
    unsigned int keeps = 0;

    for (entry = told->entries; entry < told->entries + told->nent; entry++)
        if (entry->function == 13 && entry->index == 0)
            keeps = entry->eax;
    for (entry = told->entries; entry < told->entries + told->nent; entry++) {
        if (entry->function == 1 && (keeps & KEEPS_AVX))
            entry->ecx |= XSAVE_AND_AVX;
        if (entry->function == 7 && entry->index == 0 && (keeps & KEEPS_AVX512) == KEEPS_AVX512)
            entry->ebx |= AVX2 | AVX512;
    }
}

int ioctl(int fd, unsigned long wide, ...)
{
    /* QEMU passes an int. */
    unsigned int request = (unsigned int)wide;
    va_list arguments;
    void *argument;
    long answer;

    va_start(arguments, wide);
    argument = va_arg(arguments, void *);
    va_end(arguments);
    if (fd >= 0 && fd < FDS && kinds[fd] != OTHER) {
        if (request == (unsigned int)KVM_SET_SREGS || request == (unsigned int)KVM_SET_SREGS2)
            kinds[fd] = WAS_SET;
        if (request == KVM_RUN && kinds[fd] == WAS_SET) {
            kinds[fd] = VCPU;
            put_right(fd);
        }
    }
    answer = call(fd, request, argument);
    if (request == KVM_CREATE_VCPU && answer >= 0 && answer < FDS)
        kinds[answer] = WAS_SET;
    if (request == (unsigned int)KVM_GET_SUPPORTED_CPUID && answer == 0)
        tell_of_vectors(argument);
    return (int)answer;
}
