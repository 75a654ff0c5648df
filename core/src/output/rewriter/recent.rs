//! What is known of connections, and which of them was used longest ago.

use crate::output::{list::List, packet::FlowKey};
use std::collections::HashMap;

/// A bounded map: when it is full, the longest unused goes.
#[derive(Debug)]
pub(super) struct Recent<T> {
    most: usize,
    // Looked up only, never walked: its order is not the same in two runs.
    ids: HashMap<FlowKey, usize>,
    list: List<(FlowKey, T)>,
}

impl<T> Recent<T> {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            ids: HashMap::new(),
            list: List::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn get(&self, key: &FlowKey) -> Option<&T> {
        self.list.get(*self.ids.get(key)?).map(|(_, found)| found)
    }

    /// The connection, which counts as used now.
    pub(super) fn used(&mut self, key: &FlowKey) -> Option<&mut T> {
        let id = *self.ids.get(key)?;
        self.list.move_to_back(id);
        self.list.get_mut(id).map(|(_, found)| found)
    }

    pub(super) fn insert(&mut self, key: FlowKey, known: T) {
        self.remove(&key);
        if self.list.len() >= self.most
            && let Some((oldest, _)) = self.list.first().and_then(|id| self.list.remove(id))
        {
            self.ids.remove(&oldest);
        }
        self.ids.insert(key, self.list.push_back((key, known)));
    }

    pub(super) fn remove(&mut self, key: &FlowKey) {
        if let Some(id) = self.ids.remove(key) {
            self.list.remove(id);
        }
    }

    /// All of them, the longest unused first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &(FlowKey, T)> {
        self.list.iter()
    }

    /// Changes each of them.
    pub(super) fn for_each(&mut self, mut change: impl FnMut(&mut T)) {
        self.list.for_each(|(_, known)| change(known));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn when_there_are_too_many_the_longest_unused_is_forgotten() {
        let key = |peer_port| FlowKey {
            nic: 0,
            vlan: 0,
            vm: Ipv4Addr::new(10, 0, 0, 1).into(),
            peer: Ipv4Addr::new(10, 0, 0, 2).into(),
            vm_port: 80,
            peer_port,
            protocol: 6,
        };
        let mut recent = Recent::new(10);
        for port in 0..1000 {
            recent.insert(key(port), ());
            assert!(recent.used(&key(0)).is_some(), "it is in use");
            assert!(recent.len() <= 10 && recent.ids.len() <= 10);
        }
        let kept: Vec<u16> = recent.iter().map(|(key, _)| key.peer_port).collect();
        assert_eq!(kept, [991, 992, 993, 994, 995, 996, 997, 998, 999, 0]);
    }
}
