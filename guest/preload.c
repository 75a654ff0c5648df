/* preload.c: the one piece of ours that runs inside QEMU's process.
 *
 * Decides:   nothing. Its constructor makes a userfaultfd for this address space, hands it to the
 *            daemon over an inherited socket, and is done before QEMU's main() begins.
 * Flow:      daemon (inherited /dev/userfaultfd + socket) -> here -> SCM_RIGHTS -> daemon.
 * Invariants: 1. no thread, no hook and no memory of ours stays behind;
 *             2. on any failure one line is printed on stderr and QEMU does not start.
 * Source:    userfaultfd(2); linux/userfaultfd.h (USERFAULTFD_IOC_NEW).
 * Not here:  UFFDIO_API, registration and write protection: the daemon does these on the descriptor.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define NEW_USERFAULTFD 0xAA00 /* USERFAULTFD_IOC_NEW: _IO(0xAA, 0x00) */

static void give_up(const char *what)
{
    fprintf(stderr, "dunlin: no memory tracking: %s: %s\n", what, strerror(errno));
    _exit(121);
}

__attribute__((constructor)) static void hand_out_userfaultfd(void)
{
    const char *descriptors = getenv("DUNLIN_UFFD"); /* "DEVICE:SOCKET" */
    int device = -1, sock = -1;

    if (!descriptors || sscanf(descriptors, "%d:%d", &device, &sock) != 2)
        return; /* not started by dunlin */

    /* An ordinary process may make a userfaultfd that also sees the kernel's own accesses (KVM's and
     * read(2)'s writes) only through a descriptor of /dev/userfaultfd that somebody else opened. */
    int uffd = ioctl(device, NEW_USERFAULTFD, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0)
        give_up("userfaultfd");

    char byte = 'u', control[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec part = { .iov_base = &byte, .iov_len = 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &uffd, sizeof uffd);
    if (sendmsg(sock, &message, MSG_NOSIGNAL) != 1)
        give_up("sending the userfaultfd");

    close(uffd);
    close(device);
    close(sock);
    unsetenv("DUNLIN_UFFD");
    unsetenv("LD_PRELOAD");
}
