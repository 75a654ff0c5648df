//! Services that are no part of a machine's own files: each a directory of Debian's packages, which is a bare program's `root`.
//!
//! * **Decides:** what is in it, and whose its data are.
//! * **Flow:** packages -> one directory, with busybox as its shell -> the service's own preparation, its first files -> the cache.
//! * **Invariants:** (1) nothing is installed, and no package's own service begins; (2) a directory appears in the cache whole or not at all.
//! * **Not here:** how it is served (`crate::program::services`); guests with the same packages (`services`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::{packages, rootfs};

/// Raised whenever the builder itself changes what a directory holds.
const BUILDER: &str = "dunlin root 1";
/// Where a service's own files are, and what it writes first.
const DATA: &str = "data";

/// A service in a directory.
#[derive(Debug)]
pub struct Root {
    /// Its name.
    pub name: &'static str,
    /// Debian's packages that it is made of.
    packages: &'static [&'static str],
    /// Run once, as [`Root::user`], when the directory is made.
    prepare: Option<&'static str>,
    /// Further files: path in it, contents.
    files: &'static [(&'static str, &'static str)],
    /// Whose its data are, by number.
    pub user: u32,
}

/// A web server that hands its pages to PHP.
pub const PHP: Root = Root {
    name: "lighttpd",
    packages: &["lighttpd", "php8.2-cgi"],
    prepare: None,
    files: &[
        (
            "etc/dunlin/lighttpd.conf",
            include_str!("roots/php/lighttpd.conf"),
        ),
        ("srv/www/count.php", include_str!("roots/php/count.php")),
    ],
    user: 0,
};

/// It refuses to be root.
pub const POSTGRESQL: Root = Root {
    name: "postgresql",
    packages: &["postgresql-15"],
    prepare: Some(include_str!("roots/postgresql/prepare.sh")),
    files: &[],
    user: 65_534,
};

/// With a user who has no password.
pub const MARIADB: Root = Root {
    name: "mariadb",
    packages: &["mariadb-server"],
    prepare: Some(include_str!("roots/mariadb/prepare.sh")),
    files: &[],
    user: 0,
};

/// The directory of `root`, from the cache under `dir` or freshly made.
///
/// # Errors
/// When a package cannot be had or the service's preparation fails; the message says which.
pub fn ensure(root: &Root, dir: &Path, say: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let busybox = packages::resolve("busybox-static")?;
    let wanted = rootfs::closure(root.packages, dir)?;
    let mut hash = Sha256::new();
    let mut mix = |part: &str| {
        hash.update(part.as_bytes());
        hash.update([0]);
    };
    mix(BUILDER);
    mix(root.prepare.unwrap_or(""));
    mix(&root.user.to_string());
    for package in wanted.iter().chain([&busybox]) {
        mix(&package.to_string());
    }
    for (path, contents) in root.files {
        mix(path);
        mix(contents);
    }
    let key = super::short(hash);
    let home = dir.join(format!("root-{}-{key}", root.name));
    if home.exists() {
        return Ok(home);
    }
    say(&format!("{}: {} packages", root.name, wanted.len()));
    let making = dir.join(format!("making-{}-{key}", std::process::id()));
    let _ = fs::remove_dir_all(&making);
    let (tree, tools) = (making.join("tree"), making.join("busybox"));
    rootfs::unpack(&wanted, dir, &tree)?;
    let busybox = packages::unpack(&busybox, dir, &tools)?;
    rootfs::add_busybox(&tree, &busybox)?;
    let put = |path: &str, contents: &str| -> Result<()> {
        let to = tree.join(path);
        fs::create_dir_all(to.parent().context("a folder")?)?;
        // A package's link of that name must not lead the write astray.
        let _ = fs::remove_file(&to);
        fs::write(&to, contents).with_context(|| format!("cannot write {}", to.display()))
    };
    put(
        "etc/passwd",
        "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534::/data:/bin/sh\n",
    )?;
    put("etc/group", "root:x:0:\nnogroup:x:65534:\n")?;
    put("etc/hosts", "127.0.0.1 localhost\n")?;
    // Whoever is not root has its socket there.
    fs::set_permissions(tree.join("tmp"), fs::Permissions::from_mode(0o1777))?;
    for (path, contents) in root.files {
        put(path, contents)?;
    }
    if let Some(prepare) = root.prepare {
        put("etc/dunlin/prepare", prepare)?;
        rootfs::run_inside(&tree, root.user, "/etc/dunlin/prepare")?;
    }
    belongs_to(&tree.join(DATA), root.user)?;
    super::into_place(&tree, &home)?;
    fs::remove_dir_all(&making)?;
    Ok(home)
}

/// Whoever made it was root, whatever it was called inside.
fn belongs_to(path: &Path, user: u32) -> Result<()> {
    std::os::unix::fs::lchown(path, Some(user), Some(user))
        .with_context(|| format!("{}: its owner", path.display()))?;
    if !fs::symlink_metadata(path)?.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        belongs_to(&entry?.path(), user)?;
    }
    Ok(())
}
