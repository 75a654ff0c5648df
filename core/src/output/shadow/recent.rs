//! The connections, and which of them was used longest ago.

use super::connection::Connection;
use crate::output::{list::List, packet::FlowKey};
use std::collections::HashMap;

/// A bounded map: when it is full, the longest unused goes.
#[derive(Debug)]
pub(super) struct Recent {
    most: usize,
    // Looked up only, never walked: its order is not the same in two runs.
    ids: HashMap<FlowKey, usize>,
    list: List<(FlowKey, Connection)>,
}

impl Recent {
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

    pub(super) fn get(&self, key: &FlowKey) -> Option<&Connection> {
        self.list.get(*self.ids.get(key)?).map(|(_, found)| found)
    }

    /// The connection, which counts as used now.
    pub(super) fn used(&mut self, key: &FlowKey) -> Option<&mut Connection> {
        let id = *self.ids.get(key)?;
        self.list.move_to_back(id);
        self.list.get_mut(id).map(|(_, found)| found)
    }

    pub(super) fn insert(&mut self, key: FlowKey, connection: Connection) {
        self.remove(&key);
        if self.list.len() >= self.most
            && let Some((oldest, _)) = self.list.first().and_then(|id| self.list.remove(id))
        {
            self.ids.remove(&oldest);
        }
        self.ids.insert(key, self.list.push_back((key, connection)));
    }

    pub(super) fn remove(&mut self, key: &FlowKey) {
        if let Some(id) = self.ids.remove(key) {
            self.list.remove(id);
        }
    }

    /// All of them, the longest unused first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &(FlowKey, Connection)> {
        self.list.iter()
    }

    /// Changes each of them.
    pub(super) fn for_each(&mut self, mut change: impl FnMut(&mut Connection)) {
        self.list.for_each(|(_, connection)| change(connection));
    }
}
