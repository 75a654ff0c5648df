//! A minimal Linux guest for these tests: Debian's cloud kernel (fetched, never installed) and a busybox initramfs.
//!
//! The initramfs loads the virtio modules, gives eth0 an address, and keeps memory busy on every vCPU; it prints
//! `GUEST-READY` and then a `tick N` line a few times a second on the serial console. With `test.card=late` on the kernel's
//! command line it says `NO-CARD-YET` and waits five seconds before it sets up its network card. With `test.resets` it reboots
//! when 10.77.0.99 asks for its address, and panics when 10.77.0.98 does. Under a UEFI it says `VARIABLES:` with the names of
//! those of its variables that begin with `Test`, and makes one when 10.77.0.97 (`TestKept`) or 10.77.0.96 (`TestStray`) asks.

use std::path::{Path, PathBuf};
use std::process::Command;

const MODULES: [&str; 10] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "virtio_mmio",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_blk",
];

/// Loaded under a UEFI only.
const UEFI_MODULE: &str = "efivarfs";

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs -o size=24m tmp /tmp
exec >/dev/ttyS0 2>&1 </dev/null
grep -q test.card=late /proc/cmdline && late=yes
for m in $(cat /modules/list); do
  if [ "$late$m" = yesvirtio_net ]; then echo "NO-CARD-YET"; sleep 5; echo "CARD-NEXT"; fi
  insmod /modules/$m.ko
done
ip link set lo up; ip link set eth0 up; ip addr add 10.77.0.2/24 dev eth0
if [ -d /sys/firmware/efi ]; then
  insmod /modules/efivarfs.ko; mount -t efivarfs variables /sys/firmware/efi/efivars
  echo VARIABLES: $(cd /sys/firmware/efi/efivars; echo Test*) .
fi
remember() {
  printf '\007\000\000\000%s' "$1" > /sys/firmware/efi/efivars/$1-d0d0d0d0-0000-4000-8000-00000000da7a && echo "REMEMBERED $1"
}
cpus=$(nproc)
echo "GUEST-READY cpus=$cpus"
churn() {
  n=0
  while :; do
    dd if=/dev/urandom of=/tmp/churn$1 bs=16k count=$((8 + n % 24)) 2>/dev/null
    md5sum /tmp/churn$1 >/tmp/sum$1
    n=$((n + 1)); usleep 15000
  done
}
i=0; while [ $i -lt $cpus ]; do churn $i & i=$((i + 1)); done
if [ -b /dev/vda ]; then
  while :; do dd if=/tmp/churn0 of=/dev/vda bs=4k count=8 conv=fsync 2>/dev/null; usleep 50000; done &
fi
grep -q test.resets /proc/cmdline && resets=yes
n=0; while :; do
  echo "tick $n"; n=$((n + 1)); usleep 200000
  [ "$resets" ] || continue
  grep -q '^10.77.0.97 ' /proc/net/arp && [ ! "$kept" ] && { kept=yes; remember TestKept; }
  grep -q '^10.77.0.96 ' /proc/net/arp && [ ! "$stray" ] && { stray=yes; remember TestStray; }
  grep -q '^10.77.0.99 ' /proc/net/arp && { echo RESETTING; reboot -f; }
  grep -q '^10.77.0.98 ' /proc/net/arp && { echo RESETTING; echo c > /proc/sysrq-trigger; }
done
"#;

/// Kernel and initramfs.
pub struct Image {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

/// Builds the image once per target directory; several test processes may ask at once.
pub fn image() -> Image {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest-image");
    std::fs::create_dir_all(&dir).unwrap();
    let lock = std::fs::File::create(dir.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let tree = dir.join("kernel");
    if find(&tree.join("boot"), "vmlinuz-").is_none() {
        fetch_kernel(&dir, &tree);
    }
    let kernel = find(&tree.join("boot"), "vmlinuz-").expect("the package holds a kernel");
    let initrd = dir.join("initramfs.cpio");
    let content = initramfs(&tree);
    if std::fs::read(&initrd).ok().as_deref() != Some(&content) {
        std::fs::write(dir.join("new"), content).unwrap();
        std::fs::rename(dir.join("new"), &initrd).unwrap();
    }
    Image { kernel, initrd }
}

fn fetch_kernel(dir: &Path, tree: &Path) {
    let say = "fetching the test kernel: is the network up, is `apt-get update` recent?";
    let depends = Command::new("apt-cache")
        .args(["depends", "linux-image-cloud-amd64"])
        .output()
        .expect(say);
    let text = String::from_utf8_lossy(&depends.stdout).into_owned();
    let package = text
        .lines()
        .find_map(|l| l.trim().strip_prefix("Depends: "))
        .expect(say);
    let run = |program: &str, args: &[&str]| {
        let status = Command::new(program)
            .args(args)
            .current_dir(dir)
            .stdout(std::process::Stdio::null())
            .status();
        assert!(
            status.expect(program).success(),
            "{program} {args:?} failed; {say}"
        );
    };
    run("apt-get", &["-q", "download", package]);
    let deb = find(dir, "linux-image-").expect("downloaded");
    run("dpkg-deb", &["-x", deb.to_str().unwrap(), tree.to_str().unwrap()]);
    std::fs::remove_file(deb).unwrap();
}

fn find(dir: &Path, prefix: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.filter_map(Result::ok);
    entries
        .map(|e| e.path())
        .find(|p| p.file_name().unwrap().to_string_lossy().starts_with(prefix))
}

fn module(dir: &Path, name: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(dir).ok()?.filter_map(Result::ok) {
        let path = entry.path();
        match entry.file_type().unwrap().is_dir() {
            true => {
                if let Some(found) = module(&path, name) {
                    return Some(found);
                }
            }
            false if path.file_name().unwrap().to_string_lossy() == format!("{name}.ko") => {
                return Some(path);
            }
            false => {}
        }
    }
    None
}

fn initramfs(tree: &Path) -> Vec<u8> {
    let busybox = std::fs::read("/bin/busybox").expect("busybox: apt-get install busybox-static");
    let mut cpio = Cpio::default();
    for dir in ["bin", "modules"] {
        cpio.add(dir, 0o040755, &[]);
    }
    cpio.add("bin/busybox", 0o100755, &busybox);
    cpio.add("init", 0o100755, INIT.as_bytes());
    cpio.add("modules/list", 0o100644, MODULES.join(" ").as_bytes());
    let lib = find(&tree.join("lib/modules"), "").expect("the package holds modules");
    for name in MODULES.into_iter().chain([UEFI_MODULE]) {
        let path = module(&lib, name).unwrap_or_else(|| panic!("no module {name} in {}", lib.display()));
        cpio.add(
            &format!("modules/{name}.ko"),
            0o100644,
            &std::fs::read(path).unwrap(),
        );
    }
    cpio.finish()
}

/// The "newc" format of cpio(5), as Documentation/driver-api/early-userspace/buffer-format.rst gives it.
#[derive(Default)]
struct Cpio(Vec<u8>, u32);

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.1 += 1;
        let fields = [
            self.1,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.0.extend_from_slice(b"070701");
        fields
            .iter()
            .for_each(|f| self.0.extend_from_slice(format!("{f:08x}").as_bytes()));
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(0);
        self.pad();
        self.0.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.0
    }
}
