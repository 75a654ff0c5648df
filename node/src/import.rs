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
pub mod source;
mod variables;

use dunlin_guest::{Accel, DiskSpec, FirmwareKind, Machine, NicSpec};
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::HashMap;
use std::path::PathBuf;
pub use variables::{Nvram, carry};

/// A domain has a few hundred.
const MOST_NODES: u32 = 20_000;
/// Of a name or a path of the XML in a message.
const SHOWN_CHARACTERS: usize = 120;

/// What a person chose.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The hosts that can run the VM, the first preferred.
    pub members: Vec<String>,
    /// The third host.
    pub witness: Option<String>,
    /// The bridge for network cards that the domain has on none.
    pub bridge: Option<String>,
    /// Disks and network cards of other kinds become virtio.
    pub virtio: bool,
}

/// A VM made of a domain.
#[derive(Debug)]
pub struct Imported {
    /// The VM's name.
    pub name: String,
    /// What of it lies in another file, one line each.
    pub carried: Vec<String>,
    /// What is not in it, one line each.
    pub left_out: Vec<String>,
    /// A UEFI's variables, of which no line says anything yet.
    pub nvram: Option<Nvram>,
    /// The VM's file, without these lines.
    table: String,
}

/// Why there is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ImportError {
    /// Not a domain.
    #[error("{0}")]
    NoDomain(String),
    /// A domain that would not work, one line for each reason.
    #[error("{}", .0.join("; "))]
    Refused(Vec<String>),
}

/// What is known of the VM so far.
#[derive(Default)]
struct Import {
    name: String,
    accel: Accel,
    machine: Machine,
    firmware: FirmwareKind,
    nvram: Option<Nvram>,
    memory_mib: u64,
    vcpus: u32,
    cpu: Option<String>,
    kernel: Option<PathBuf>,
    initrd: Option<PathBuf>,
    append: Option<String>,
    disks: Vec<DiskSpec>,
    nics: Vec<NicSpec>,
    left_out: Lines,
    refused: Lines,
}

/// Lines in the order in which they came; one that comes again is counted.
#[derive(Default)]
struct Lines {
    lines: Vec<(String, usize)>,
    places: HashMap<String, usize>,
}

impl Lines {
    fn push(&mut self, line: impl Into<String>) {
        let line = line.into();
        match self.places.get(&line) {
            Some(&place) => self.lines[place].1 += 1,
            None => {
                self.places.insert(line.clone(), self.lines.len());
                self.lines.push((line, 1));
            }
        }
    }

    fn into_vec(self) -> Vec<String> {
        let shown = |(line, count)| match count {
            1 => line,
            more => format!("{line} ({more} times)"),
        };
        self.lines.into_iter().map(shown).collect()
    }
}

impl Import {
    /// The VM will not have it, and works.
    fn leave_out(&mut self, what: impl std::fmt::Display, why: &str) {
        self.left_out.push(format!("{what}: {why}"));
    }

    /// A VM without it would not work.
    fn refuse(&mut self, what: impl std::fmt::Display, why: impl std::fmt::Display) {
        self.refused.push(format!("{what}: {why}"));
    }
}

/// Makes a VM's file of a domain's XML.
pub fn domain(xml: &str, options: &Options) -> Result<Imported, ImportError> {
    if xml.len() > source::MOST_BYTES {
        return Err(ImportError::NoDomain(source::TextError::TooLong.to_string()));
    }
    let limits = ParsingOptions {
        allow_dtd: false,
        nodes_limit: MOST_NODES,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(xml, limits).map_err(|error| {
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

/// The first element of that name directly below.
fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    children(node, name).next()
}

/// All elements of that name directly below.
fn children<'a, 'input>(node: Node<'a, 'input>, name: &str) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children()
        .filter(move |child| child.is_element() && child.tag_name().name() == name)
}

/// An attribute of an element directly below.
fn attribute<'a>(node: Node<'a, '_>, element: &str, name: &str) -> Option<&'a str> {
    child(node, element)?.attribute(name)
}

/// The words in an element directly below; none if there are none.
fn words<'a>(node: Node<'a, '_>, element: &str) -> Option<&'a str> {
    let text = child(node, element)?.text()?.trim();
    (!text.is_empty()).then_some(text)
}

/// For a message: on one line, and not longer than a line.
fn shown(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(SHOWN_CHARACTERS)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().nth(SHOWN_CHARACTERS).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Such as can be a file's path on a host: absolute, and without control characters.
fn is_path(text: &str) -> bool {
    text.starts_with('/') && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests;
