//! Threads for what a person orders by HTTP.
//!
//! **Decides**: on which thread an order is carried out. **Flow**: an order that has its place (`shares::WRITES`) -> [`Hands::take`] -> a thread of its own.
//! **Invariants**: 1. an order has the daemon's own priority and not the page's: a VM that it starts inherits it.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};

type Order = Box<dyn FnOnce() + Send>;

/// Takes orders until it is dropped.
pub struct Hands(SyncSender<Order>);

impl Hands {
    /// From a thread of the daemon's own priority: those that are started later have the same.
    pub fn start(places: usize) -> io::Result<Self> {
        let (give, orders) = sync_channel::<Order>(places);
        std::thread::Builder::new()
            .name("page-orders".into())
            .spawn(move || {
                for order in orders {
                    if let Err(error) = std::thread::Builder::new().name("page-order".into()).spawn(order) {
                        tracing::error!("a thread for an order: {error}");
                    }
                }
            })?;
        Ok(Self(give))
    }

    /// Carries it out; false if there is no room for it.
    pub fn take(&self, order: impl FnOnce() + Send + 'static) -> bool {
        self.0.try_send(Box::new(order)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn nice() -> i32 {
        rustix::process::getpriority_process(None).expect("a priority")
    }

    #[test]
    fn an_order_of_a_thread_of_low_priority_has_not_that_priority() {
        let hands = Hands::start(1).expect("a thread");
        let before = nice();
        let (tell, told) = channel();
        let of_page = std::thread::spawn(move || {
            rustix::process::nice(3).expect("less priority");
            let own = nice();
            let taken = hands.take(move || {
                let _ = tell.send(nice());
            });
            (own, taken)
        });
        let (own, taken) = of_page.join().expect("joined");
        assert!(taken);
        let of_order = told.recv().expect("it is carried out");
        assert_eq!((own, of_order), ((before + 3).min(19), before));
    }
}
