//! The services that the benchmarks know, each as a guest: Debian's kernel, an initramfs with the service's packages.
//!
//! The whole system lies in the guest's RAM, its data too (a database's first files are made when the image is
//! built). With a disk, the data is copied to it on the first boot (`services/init.sh`).

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::accel::RunsUnder;

use super::{GUEST_ADDRESS, GuestImage, NicBackend, cpio, kernel, packages, rootfs};

/// Raised whenever the builder itself changes what an image holds.
const BUILDER: &str = "dunlin service image 2";
const INIT: &str = include_str!("services/init.sh");
/// The user that a service runs as, if it refuses to be root.
const USER: u32 = 101;

/// A service in a guest.
#[derive(Debug)]
pub struct Service {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is, for people.
    pub title: &'static str,
    /// Debian's packages that it is made of.
    packages: &'static [&'static str],
    /// Run once, when the image is built.
    prepare: Option<&'static str>,
    /// Run by the guest's first program.
    start: &'static str,
    /// Further files: path in the guest, contents.
    files: &'static [(&'static str, &'static str)],
    /// Where it listens.
    pub port: u16,
    /// Memory of its guest.
    pub memory_mib: u32,
}

/// All but redis, whose guest ([`super::ensure`]) is smaller and older.
pub const SERVICES: [Service; 7] = [
    Service {
        name: "memcached",
        title: "memcached",
        packages: &["memcached"],
        prepare: None,
        start: include_str!("services/memcached/start.sh"),
        files: &[],
        port: 11211,
        memory_mib: 256,
    },
    Service {
        name: "postgresql",
        title: "PostgreSQL",
        packages: &["postgresql-15"],
        prepare: Some(include_str!("services/postgresql/prepare.sh")),
        start: include_str!("services/postgresql/start.sh"),
        files: &[],
        port: 5432,
        memory_mib: 1024,
    },
    Service {
        name: "mariadb",
        title: "MariaDB",
        packages: &["mariadb-server", "sysbench"],
        prepare: Some(include_str!("services/mariadb/prepare.sh")),
        start: include_str!("services/mariadb/start.sh"),
        files: &[],
        port: 3306,
        memory_mib: 1024,
    },
    Service {
        name: "nginx",
        title: "nginx, a static file, in the clear and over TLS",
        // The last two for `dunlin-guest`: busybox has no `ip` that knows windows, and its shell knows no other `ip`.
        packages: &["nginx-light", "openssl", "iproute2", "dash"],
        prepare: None,
        start: include_str!("services/nginx/start.sh"),
        files: &[
            ("etc/dunlin/nginx.conf", include_str!("services/nginx/nginx.conf")),
            (
                "etc/dunlin/nginx-tls.conf",
                include_str!("services/nginx/nginx-tls.conf"),
            ),
            ("srv/www/index.html", include_str!("services/nginx/index.html")),
            (
                "etc/dunlin/dunlin-guest",
                include_str!("../../../guest/advice/dunlin-guest"),
            ),
        ],
        port: 80,
        memory_mib: 384,
    },
    Service {
        name: "php",
        title: "lighttpd and PHP",
        packages: &["lighttpd", "php8.2-cgi"],
        prepare: None,
        start: include_str!("services/php/start.sh"),
        files: &[
            (
                "etc/dunlin/lighttpd.conf",
                include_str!("services/php/lighttpd.conf"),
            ),
            ("srv/www/index.php", include_str!("services/php/index.php")),
        ],
        port: 80,
        memory_mib: 512,
    },
    Service {
        name: "nodejs",
        title: "Node.js",
        packages: &["nodejs"],
        prepare: None,
        start: include_str!("services/node/start.sh"),
        files: &[("etc/dunlin/server.js", include_str!("services/node/server.js"))],
        port: 80,
        memory_mib: 512,
    },
    Service {
        name: "tomcat",
        title: "Tomcat, a servlet",
        packages: &["tomcat10", "tomcat10-examples", "openjdk-17-jre-headless"],
        prepare: None,
        start: include_str!("services/tomcat/start.sh"),
        files: &[
            (
                "etc/dunlin/server.xml",
                include_str!("services/tomcat/server.xml"),
            ),
            ("etc/dunlin/web.xml", include_str!("services/tomcat/web.xml")),
        ],
        port: 80,
        memory_mib: 1024,
    },
];

/// Not among those whose mean is taken: each login differs in both copies.
pub const SSH: Service = Service {
    name: "ssh",
    title: "OpenSSH",
    packages: &["openssh-server"],
    prepare: None,
    start: include_str!("services/ssh/start.sh"),
    files: &[
        ("etc/dunlin/sshd_config", include_str!("services/ssh/sshd_config")),
        ("etc/passwd", include_str!("services/ssh/passwd")),
        ("etc/shadow", include_str!("services/ssh/shadow")),
    ],
    port: 22,
    memory_mib: 256,
};

/// No service of a user's: iperf3, for the benchmark of cards.
pub const IPERF3: Service = Service {
    name: "iperf3",
    title: "iperf3",
    packages: &["iperf3"],
    prepare: None,
    start: include_str!("services/iperf3/start.sh"),
    files: &[],
    port: 5201,
    memory_mib: 256,
};

/// No service of a user's: fio, for the benchmark of disks.
pub const FIO: Service = Service {
    name: "fio",
    title: "fio on the disk",
    packages: &["fio"],
    prepare: None,
    start: include_str!("services/fio/start.sh"),
    files: &[("etc/dunlin/job", include_str!("services/fio/job.sh"))],
    port: 8765,
    memory_mib: 512,
};

/// No service of a user's either: what the campaign of random faults runs, all at once.
pub const MIXED: Service = Service {
    name: "mixed",
    title: "redis, nginx and PostgreSQL",
    packages: &["postgresql-15", "redis-server", "nginx-light"],
    prepare: Some(include_str!("services/postgresql/prepare.sh")),
    start: include_str!("services/mixed/start.sh"),
    files: &[
        ("etc/dunlin/nginx.conf", include_str!("services/nginx/nginx.conf")),
        ("srv/www/index.html", include_str!("services/nginx/index.html")),
    ],
    port: 5432,
    memory_mib: 1024,
};

/// The service of that name.
///
/// # Errors
/// With the list of all names.
pub fn service(name: &str) -> Result<&'static Service> {
    let known = || SERVICES.iter().chain([&SSH, &IPERF3]);
    let found = known().find(|service| service.name == name);
    found.with_context(|| {
        let names: Vec<&str> = known().map(|service| service.name).collect();
        format!(
            "no guest image for '{name}': there are redis, {}",
            names.join(", ")
        )
    })
}

/// The packages of the clients that are the usual ones for these services.
const CLIENTS: [&str; 7] = [
    "redis-tools",
    "postgresql-15",
    "sysbench",
    "wrk",
    "apache2-utils",
    "openssh-client",
    "iperf3",
];

/// What lies beside an image and says that it is whole.
#[derive(Serialize, Deserialize)]
struct Manifest {
    image: GuestImage,
    packages: Vec<String>,
}

/// The image of `service`, from the cache under `dir` or freshly built.
///
/// # Errors
/// When a package cannot be had or the service's preparation fails; the message says which.
pub fn ensure(service: &Service, dir: &Path, say: &mut dyn FnMut(&str)) -> Result<GuestImage> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let kernel_package = packages::resolve("linux-image-cloud-amd64")?;
    let busybox_package = packages::resolve("busybox-static")?;
    let wanted = rootfs::closure(service.packages, dir)?;
    let mut hash = Sha256::new();
    let mut mix = |part: &str| {
        hash.update(part.as_bytes());
        hash.update([0]);
    };
    for part in [
        BUILDER,
        INIT,
        kernel::COMMAND_LINE,
        service.start,
        service.prepare.unwrap_or(""),
    ] {
        mix(part);
    }
    for package in wanted.iter().chain([&kernel_package, &busybox_package]) {
        mix(&package.to_string());
    }
    for (path, contents) in service.files {
        mix(path);
        mix(contents);
    }
    let key = super::short(hash);
    let home = dir.join(format!("{}-{key}", service.name));
    if let Ok(text) = fs::read_to_string(home.join("image.json")) {
        let manifest: Manifest = serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged: remove it", home.display()))?;
        return Ok(manifest.image.in_folder(&home));
    }

    let begun = Instant::now();
    say(&format!(
        "guest image {}: {} packages",
        service.name,
        wanted.len()
    ));
    let half_made = dir.join(format!("making-{}-{key}", std::process::id()));
    let _ = fs::remove_dir_all(&half_made);
    fs::create_dir_all(&half_made)?;
    let root = half_made.join("root");
    rootfs::unpack(&wanted, dir, &root)?;
    let busybox_root = packages::unpack(&busybox_package, dir, &half_made.join("busybox.d"))?;
    rootfs::add_busybox(&root, &busybox_root)?;
    let kernel_root = packages::unpack(&kernel_package, dir, &half_made.join("kernel.d"))?;
    let found = kernel::find(&kernel_root, &[])?;
    lay_out(&root, service, &found)?;
    if let Some(prepare) = service.prepare {
        fs::write(root.join("etc/dunlin/prepare"), prepare)?;
        rootfs::run_inside(&root, USER, "/etc/dunlin/prepare")?;
    }
    fs::copy(&found.image, half_made.join("vmlinuz"))?;
    let mut archive = cpio::Archive::new();
    archive.tree(&root)?;
    archive.char_device("dev/console", 5, 1);
    // Not compressed: the guest's CPU is emulated, and unpacking would be most of its boot.
    let size = archive.write(&half_made.join("initrd.img"))?;
    for done in ["root", "kernel.d", "busybox.d"] {
        fs::remove_dir_all(half_made.join(done))?;
    }
    let image = GuestImage {
        kernel: home.join("vmlinuz"),
        initrd: home.join("initrd.img"),
        append: format!("{} dunlin.ip={GUEST_ADDRESS}", kernel::COMMAND_LINE),
        key,
        kernel_release: found.release,
        runs_under: RunsUnder::Tcg,
        nic_backend: NicBackend::Stream,
    };
    let manifest = Manifest {
        image,
        packages: wanted.iter().map(ToString::to_string).collect(),
    };
    fs::write(
        half_made.join("image.json"),
        serde_json::to_string_pretty(&manifest)?,
    )?;
    super::into_place(&half_made, &home)?;
    say(&format!(
        "guest image {}: linux {}, {:.0} MB, in {:.1} s",
        service.name,
        manifest.image.kernel_release,
        size as f64 / 1e6,
        begun.elapsed().as_secs_f64()
    ));
    Ok(manifest.image)
}

fn lay_out(root: &Path, service: &Service, kernel: &kernel::Kernel) -> Result<()> {
    let put = |path: &str, contents: &[u8]| -> Result<()> {
        let to = root.join(path);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        // A package's link of that name must not lead the write astray.
        let _ = fs::remove_file(&to);
        fs::write(&to, contents).with_context(|| format!("cannot write {}", to.display()))
    };
    put("init", INIT.as_bytes())?;
    make_executable(&root.join("init"))?;
    put("etc/dunlin/start", service.start.as_bytes())?;
    let users = format!("root:x:0:0:root:/:/bin/sh\nservice:x:{USER}:{USER}::/data:/bin/sh\n");
    put("etc/passwd", users.as_bytes())?;
    put("etc/group", format!("root:x:0:\nservice:x:{USER}:\n").as_bytes())?;
    put("etc/hosts", b"127.0.0.1 localhost dunlin-guest\n")?;
    for (path, contents) in service.files {
        put(path, contents.as_bytes())?;
    }
    let mut order = String::new();
    for (name, bytes) in &kernel.modules {
        put(&format!("modules/{name}.ko"), bytes)?;
        order.push_str(name);
        order.push('\n');
    }
    put("modules/order", order.as_bytes())
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// The clients of all services in one tree, from the cache or freshly unpacked. Nothing of it is installed: a
/// package such as PostgreSQL's would start a server on this machine.
pub fn clients(dir: &Path, say: &mut dyn FnMut(&str)) -> Result<std::path::PathBuf> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let wanted = rootfs::closure(&CLIENTS, dir)?;
    let mut hash = Sha256::new();
    hash.update("dunlin clients 2");
    for package in &wanted {
        hash.update(package.to_string());
    }
    let home = dir.join(format!("clients-{}", super::short(hash)));
    if home.exists() {
        return Ok(home);
    }
    say(&format!("clients: {} packages", wanted.len()));
    let half_made = dir.join(format!("making-{}-clients", std::process::id()));
    let _ = fs::remove_dir_all(&half_made);
    rootfs::unpack(&wanted, dir, &half_made)?;
    // ssh asks who it is run by.
    fs::write(half_made.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n")?;
    for tool in [
        "usr/bin/redis-benchmark",
        "usr/bin/iperf3",
        "usr/bin/ssh",
        "usr/bin/wrk",
        "usr/bin/sysbench",
        "usr/lib/postgresql/15/bin/pgbench",
    ] {
        if !half_made.join(tool).is_file() {
            bail!("the clients' packages hold no {tool}");
        }
    }
    super::into_place(&half_made, &home)?;
    Ok(home)
}
