//! What a person orders of a VM that runs, and a VM that is ready for a fault.

use anyhow::Result;

use super::{PATIENCE, Stage, with_role};

impl Stage<'_, '_> {
    /// The primary and the backup of a VM that could be taken over now. The step before may have waited for it too: a busy machine can cost the backup
    /// in between, and then a fault of the primary's would be the VM's end.
    pub(super) fn protected(&self) -> Result<(String, String)> {
        self.cluster.await_protected(&self.vm, PATIENCE)
    }

    pub(super) fn switch_over(&mut self) -> Result<()> {
        let (primary, at) = self.cluster.switch_over(&self.vm, PATIENCE)?;
        self.taken_over(&primary, at)
    }

    /// The command ends when it is so; a backup that is lost right then is brought in anew.
    pub(super) fn order_policy(&self, policy: &str) -> Result<()> {
        // Whichever host is asked passes it on to the one that serves the VM.
        let witness = self.with_role("witness")?;
        self.cluster.order(&witness, &["policy", &self.vm, policy])?;
        self.cluster
            .await_status(&format!("policy {policy}, as ordered"), PATIENCE, |hosts| {
                let host = with_role(hosts, &self.vm, "primary")?;
                let vm = hosts.iter().find(|status| status.host == host)?.vm(&self.vm)?;
                ((vm.policy.as_str(), vm.protected) == (policy, policy != "none")).then_some(())
            })
    }
}
