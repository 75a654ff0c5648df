//! The CPU model of a domain, as QEMU's `-cpu` takes it.

use super::parts::Import;
use super::xml::{attribute, child, children, shown, words};
use dunlin_api::files::Accel;
use roxmltree::Node;

/// Flags of one model; QEMU knows a few hundred.
const MOST_FLAGS: usize = 512;

pub fn read(domain: Node<'_, '_>, import: &mut Import) {
    let Some(cpu) = child(domain, "cpu") else { return };
    let model = words(cpu, "model");
    let mode = cpu.attribute("mode").unwrap_or("custom");
    let begins = match (mode, model) {
        // Without hardware there is no host's CPU to show.
        (_, _) if import.accel == Accel::Tcg && mode != "custom" => None,
        ("host-passthrough", _) => Some("host"),
        ("host-model", _) => {
            import.leave_out(
                "cpu host-model",
                "the VM has the host's own CPU; if 'dunlin check' finds that the two hosts differ, name a common model in vm.cpu",
            );
            Some("host")
        }
        ("maximum", _) => Some("max"),
        ("custom", model) => model,
        (other, _) => {
            import.refuse("cpu", format!("there is no mode {}", shown(other)));
            None
        }
    };
    let mut words: Vec<String> = begins.map(str::to_owned).into_iter().collect();
    for feature in children(cpu, "feature").take(MOST_FLAGS) {
        let name = feature.attribute("name").unwrap_or_default();
        let sign = match feature.attribute("policy").unwrap_or("require") {
            "require" | "force" | "optional" => '+',
            "disable" | "forbid" => '-',
            _ => '?',
        };
        if sign == '?' || !is_plain(name) {
            import.refuse("cpu feature", format!("{} cannot be understood", shown(name)));
        } else if words.is_empty() {
            import.leave_out(
                format_args!("cpu feature {}", shown(name)),
                "it belongs to no model: name one in vm.cpu",
            );
        } else {
            words.push(format!("{sign}{name}"));
        }
    }
    if begins.is_some_and(|model| !is_plain(model)) {
        import.refuse(
            "cpu",
            format!("{} is no model's name", shown(begins.unwrap_or_default())),
        );
        return;
    }
    import.cpu = (!words.is_empty()).then(|| words.join(","));
    let one_each = ["dies", "clusters", "cores", "threads"]
        .iter()
        .all(|part| attribute(cpu, "topology", part).is_none_or(|count| count == "1"));
    if !one_each {
        import.leave_out(
            "cpu topology",
            "the guest sees one socket with one core for each virtual CPU",
        );
    }
    for part in ["numa", "cache", "maxphysaddr"] {
        if child(cpu, part).is_some() {
            import.leave_out(
                format_args!("cpu {part}"),
                "the guest sees one node, and caches and addresses as QEMU has them",
            );
        }
    }
}

/// As QEMU's models and flags are named.
fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}
