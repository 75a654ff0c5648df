//! What goes wrong in the network and on the disks of a testbed, and how it is mended.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{Testbed, batch, run_with_input};

impl Testbed {
    /// Pulls a node's cable: both ends see the carrier go.
    pub fn cut_link(&self, node: &str) -> Result<()> {
        batch(&self.switch(), &format!("link set dev {node} down\n"))
    }

    /// Plugs the cable in again.
    pub fn restore_link(&self, node: &str) -> Result<()> {
        batch(&self.switch(), &format!("link set dev {node} up\n"))
    }

    /// The network learns where no address is behind the ports of these hosts: what it brings to one of them it brings to all. So it
    /// is on a segment that floods, or whose switch copies a VM's frames to both of its hosts.
    pub fn flood<Host: AsRef<str>>(&self, hosts: &[Host]) -> Result<()> {
        let learn_nothing =
            |port: &str| format!("link set dev {port} type bridge_slave learning off flood on\n");
        let ports: String = hosts.iter().map(|host| learn_nothing(host.as_ref())).collect();
        batch(&self.switch(), &ports)?;
        for host in hosts {
            // A host's own bridge would not hand on what it takes to be behind the cable.
            batch(&self.run.namespace(host.as_ref()), &learn_nothing("up0"))?;
        }
        // What was learnt before is forgotten.
        batch(&self.switch(), "link set dev br0 type bridge fdb_flush\n")?;
        for host in hosts {
            batch(
                &self.run.namespace(host.as_ref()),
                "link set dev br0 type bridge fdb_flush\n",
            )?;
        }
        Ok(())
    }

    /// Loses every frame between each node of `left` and each of `right`, in both directions and silently.
    /// VMs are reached through their host's port, so a VM is cut off with its host.
    pub fn partition(&self, left: &[&str], right: &[&str]) -> Result<()> {
        self.lose(&[(left, right), (right, left)])
    }

    /// Loses every frame from the first nodes of each pair to its second ones, silently; the other way is open. Takes the place
    /// of whatever was lost before.
    pub fn lose(&self, ways: &[(&[&str], &[&str])]) -> Result<()> {
        let quoted = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
            names.join(", ")
        };
        let mut rules = String::from(
            "table bridge testbed\ndelete table bridge testbed\ntable bridge testbed {\nchain cut {\n",
        );
        rules.push_str("type filter hook forward priority 0; policy accept;\n");
        for (from, to) in ways {
            let (from, to) = (quoted(from), quoted(to));
            rules.push_str(&format!("iifname {{ {from} }} oifname {{ {to} }} drop\n"));
        }
        rules.push_str("}\n}\n");
        self.nft(&rules)
    }

    /// Ends every partition.
    pub fn heal(&self) -> Result<()> {
        self.nft("table bridge testbed\ndelete table bridge testbed\n")
    }

    fn nft(&self, rules: &str) -> Result<()> {
        run_with_input(
            Command::new("ip").args(["netns", "exec", &self.switch(), "nft", "-f", "-"]),
            rules,
        )
    }

    /// The node's cable carries that many kilobits a second in each direction. What waits for it waits in a queue of
    /// `queue_ms`, as in a switch that is too small; beyond that it is dropped. Returns the longest that a frame can wait.
    pub fn slow_link(&self, node: &str, kbit: u64, queue_ms: u64) -> Result<Duration> {
        const BURST_BYTES: u64 = 32 << 10;
        for (namespace, device) in self.ends(node) {
            let rate = format!("{kbit}kbit");
            let latency = format!("{queue_ms}ms");
            let burst = BURST_BYTES.to_string();
            let words = [
                "qdisc", "replace", "dev", &device, "root", "tbf", "rate", &rate, "burst", &burst, "latency",
                &latency,
            ];
            tc(&namespace, &words)?;
        }
        // The queue has room for what the rate carries in that time and for a burst more (tc-tbf(8)).
        Ok(Duration::from_millis(queue_ms + BURST_BYTES * 8 / kbit))
    }

    /// The cable is as fast as the machine again.
    pub fn mend_link(&self, node: &str) -> Result<()> {
        for (namespace, device) in self.ends(node) {
            tc(&namespace, &["qdisc", "del", "dev", &device, "root"])?;
        }
        Ok(())
    }

    fn ends(&self, node: &str) -> [(String, String); 2] {
        [
            (self.switch(), node.to_owned()),
            (self.run.namespace(node), "up0".to_owned()),
        ]
    }

    pub(super) fn switch(&self) -> String {
        self.run.namespace("switch")
    }
}

fn tc(namespace: &str, words: &[&str]) -> Result<()> {
    let output = Command::new("tc")
        .args(["-n", namespace])
        .args(words)
        .output()
        .context("tc is not here: apt-get install iproute2 (or 'cargo xtask setup')")?;
    if !output.status.success() {
        bail!(
            "tc -n {namespace} {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// A folder with a file system of its own and so much room: what fills it fills nothing else.
pub struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    /// Puts it over the folder `at` of a testbed; what was in the folder is not seen meanwhile. It survives the processes of its
    /// host, and goes with this value, or with the testbed.
    pub fn mount(at: &Path, mib: u64) -> Result<Self> {
        fs::create_dir_all(at)?;
        let options = format!("size={mib}m,mode=0700");
        mount(
            Some("dunlin-testbed"),
            at,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .with_context(|| format!("cannot mount a small disk at {}", at.display()))?;
        Ok(Self { at: at.to_owned() })
    }

    /// Takes all the room that is left.
    pub fn fill(&self) -> Result<()> {
        let mut file = fs::File::options()
            .create(true)
            .append(true)
            .open(self.filler())?;
        let mut piece = vec![0x55; 1 << 20];
        while !piece.is_empty() {
            match file.write(&piece) {
                Ok(count) if count > 0 => {}
                // The last bytes, too.
                _ => piece.truncate(piece.len() / 2),
            }
        }
        Ok(())
    }

    /// There is room again.
    pub fn free(&self) -> Result<()> {
        Ok(fs::remove_file(self.filler())?)
    }

    fn filler(&self) -> PathBuf {
        self.at.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Whoever still works there keeps it until he ends.
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}
