//! `import`: a libvirt domain becomes a VM's file.
//!
//! **Decides**: what of a domain Dunlin can carry over, what it leaves out (one line each, with the reason), and what it refuses
//! because a VM made of it would not work. **Flow**: [`source`] reads the XML -> [`domain`] -> [`machine`], [`disks`] and
//! [`others`] look at its parts -> [`Import`] -> [`file::finish`]; a UEFI's variables are a file of their own, which the command line copies ([`carry`]).
//! **Invariants**: 1. the text that is returned is taken by the parser of `dunlin up`. 2. nothing is dropped in silence: what is not in
//! the file is in a line. 3. hostile XML costs a bounded amount of memory and time: [`source::MOST_BYTES`], no document type, a
//! limit of nodes. 4. a line never contains the XML's own control characters.
//! **Source**: libvirt's formatdomain.html, and what `virt-install --print-xml` and `virsh dumpxml` write.
//! **Not here**: whether the hosts have what the VM needs (`dunlin check VM.TOML`), copying disks.

mod cpu;
mod disks;
mod file;
mod machine;
mod others;
mod parts;
pub mod source;
mod variables;
mod xml;

use parts::Import;
pub use parts::{ImportError, Imported, Options};
use roxmltree::{Document, ParsingOptions};
pub use variables::carry;
use xml::{child, shown};

/// A domain has a few hundred.
const MOST_NODES: u32 = 20_000;

/// Makes a VM's file of a domain's XML.
pub fn domain(text: &str, options: &Options) -> Result<Imported, ImportError> {
    if text.len() > source::MOST_BYTES {
        return Err(ImportError::NoDomain(source::TextError::TooLong.to_string()));
    }
    let limits = ParsingOptions {
        allow_dtd: false,
        nodes_limit: MOST_NODES,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(text, limits).map_err(|error| {
        ImportError::NoDomain(format!(
            "this is no XML of a domain: {}",
            shown(&error.to_string())
        ))
    })?;
    let root = document.root_element();
    if root.tag_name().name() != "domain" {
        let found = shown(root.tag_name().name());
        return Err(ImportError::NoDomain(format!(
            "this is no domain but <{found}>; 'virsh dumpxml NAME' writes one"
        )));
    }
    let mut import = Import::default();
    machine::read(root, &mut import);
    cpu::read(root, &mut import);
    others::top(root, &mut import);
    if let Some(devices) = child(root, "devices") {
        disks::read(devices, options, &mut import);
        others::nics(devices, options, &mut import);
        others::devices(devices, &mut import);
    }
    file::finish(import, options)
}

#[cfg(test)]
mod tests;
