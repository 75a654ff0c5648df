//! A peer's life: the greeting, the first copy while the VM writes, what the peer says, the end.
//!
//! Decides: who becomes a peer, and what it may lack. Flow: [`Primary::attach`] -> a thread -> greeting -> copier beside the listener.
//! Invariants: P6 of [`super`].
//! Not here: the copy itself ([`super::copying`]), the VM's writes, the map of what a peer lacks ([`super`]).

use super::copying::{Answer, Copier, MOST_ANSWERS};
use super::*;
use crate::disk::link::ReceiveError;
use dunlin_core::disk::mirror::MirrorError;
use dunlin_core::waits::Wait;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender, TrySendError};

/// Why a join comes to nothing, or its copy does not go on.
#[derive(Debug, thiserror::Error)]
enum JoinError {
    /// This host's greeting cannot be made.
    #[error(transparent)]
    OwnGreeting(io::Error),
    /// The backup's has not come in so long.
    #[error("{}", Wait::MirrorGreets.said_of(*.0))]
    InVain(Duration),
    /// The backup's words.
    #[error("{0}")]
    Refused(String),
    /// The backup said something else first.
    #[error("the backup did not greet: is it the same build?")]
    NoGreeting,
    /// The stream ended, or carries no frames.
    #[error(transparent)]
    Stream(#[from] ReceiveError),
    /// The backup's greeting is none of ours.
    #[error(transparent)]
    Greeting(#[from] MirrorError),
    /// The two images cannot be a pair.
    #[error("the backup's disk has {theirs} bytes, this one {ours}: make them the same size")]
    OtherSize {
        /// The backup's.
        theirs: u64,
        /// This host's.
        ours: u64,
    },
}

impl Primary {
    /// Runs on a thread of its own for as long as the peer is there: greeting, then what the peer says. A join that still waits
    /// for its peer's greeting is given up for this one.
    pub(in crate::disk) fn attach(
        self: &Arc<Self>,
        stream: MirrorStream,
        options: AttachOptions,
    ) -> Result<(), DiskError> {
        self.give_up_greeting("another join has begun");
        let MirrorStream {
            reader,
            writer,
            shutdown,
        } = stream;
        let shutdown: Arc<dyn Fn() + Send + Sync> = Arc::from(shutdown);
        let join = {
            let mut state = self.lock();
            if state.peer.is_some() {
                return Err(DiskError::HasBackup);
            }
            state.joins += 1;
            state.greeting = Some(Greeting {
                join: state.joins,
                shutdown: shutdown.clone(),
            });
            state.joins
        };
        let this = self.clone();
        let begun = thread::Builder::new().name("disk-mirror".into()).spawn(move || {
            if let Err(error) = this.converse(join, reader, writer, shutdown, options) {
                this.greeting_failed(join, error.to_string());
            }
        });
        match begun {
            Ok(_detached) => Ok(()),
            Err(error) => {
                self.take_greeting(join);
                Err(DiskError::Thread(error))
            }
        }
    }

    /// P6. Whoever takes it out says how the join went.
    fn take_greeting(&self, join: u64) -> bool {
        let greeting = &mut self.lock().greeting;
        greeting.take_if(|greeting| greeting.join == join).is_some()
    }

    fn greeting_failed(&self, join: u64, reason: String) {
        if self.take_greeting(join) {
            self.shared.event(DiskEvent::AttachFailed { reason });
        }
    }

    /// The join whose peer has not greeted yet, if there is one, is over, and whoever waits for it hears so.
    pub(super) fn give_up_greeting(&self, reason: &str) {
        let greeting = self.lock().greeting.take();
        if let Some(greeting) = greeting {
            (greeting.shutdown)();
            self.shared.event(DiskEvent::AttachFailed {
                reason: reason.into(),
            });
        }
    }

    /// The peer's greeting, or why there is none. A stream knows no bound for what it does: whoever waits for it is beside it, and
    /// breaks it.
    fn greet(
        &self,
        hello: &Hello,
        reader: &mut (dyn io::Read + Send),
        writer: &mut (dyn io::Write + Send),
        shutdown: &(dyn Fn() + Send + Sync),
        bound: Duration,
    ) -> Result<(Hello, Bytes), JoinError> {
        let (came, comes) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let watch = scope.spawn(move || {
                let in_vain = comes.recv_timeout(bound) == Err(RecvTimeoutError::Timeout);
                if in_vain {
                    shutdown();
                }
                in_vain
            });
            let greeted = exchange(hello, reader, writer);
            drop(came);
            match watch.join() {
                Ok(true) => Err(JoinError::InVain(bound)),
                _ => greeted,
            }
        })
    }

    fn converse(
        self: &Arc<Self>,
        join: u64,
        mut reader: Box<dyn io::Read + Send>,
        mut writer: Box<dyn io::Write + Send>,
        shutdown: Arc<dyn Fn() + Send + Sync>,
        options: AttachOptions,
    ) -> Result<(), JoinError> {
        let hello = self.shared.hello(true).map_err(JoinError::OwnGreeting)?;
        self.shared.dirty.track();
        let bound = options.tuning.greeting;
        let (theirs, their_extents) = self.greet(&hello, &mut *reader, &mut *writer, &*shutdown, bound)?;
        let same_pair = hello.pair == theirs.pair && hello.pair != [0; 16];
        let lacks = if same_pair && !options.whole {
            their_extents
                .chunks_exact(8)
                .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes")))
                .filter(|extent| *extent < hello.size_bytes.div_ceil(EXTENT_BYTES))
                .collect()
        } else {
            ExtentSet::whole(hello.size_bytes)
        };
        let link = Link::new(Box::new(move || shutdown()), options.tuning);
        let total = {
            let mut state = self.lock();
            if state.greeting.take_if(|greeting| greeting.join == join).is_none() {
                // Given up meanwhile, and told (P6).
                link.close("the join was given up");
                return Ok(());
            }
            state.extents.gather();
            state.extents.widen_base(&lacks);
            // The peer's notes are kept on disk here too: should this host restart in the middle, they are not lost.
            let left = state.extents.needed();
            let total = left.len();
            state.peer = Some(Peer {
                link: link.clone(),
                copying: Some(Copying {
                    left,
                    again: 0,
                    strict: false,
                    unwritten: ExtentSet::default(),
                }),
                joined_at: None,
                joined: false,
                next_pair: hello.next_pair,
            });
            total
        };
        self.shared.event(DiskEvent::CopyStarted {
            bytes: total * EXTENT_BYTES,
            whole: !same_pair || options.whole,
        });
        let orders = Orders::default();
        let (told, answers) = mpsc::sync_channel(MOST_ANSWERS);
        thread::scope(|scope| {
            let sender = link.clone();
            scope.spawn(move || sender.send_all(&mut *writer));
            let copier = Copier::new(self, &link, answers, total, options.copy_bytes_per_s);
            scope.spawn(|| copier.run());
            scope.spawn(|| self.keep_map(&link, &orders));
            let ended = self.listen(&link, &mut *reader, &orders, &told);
            orders.end();
            self.lost(&link, &ended);
        });
        Ok(())
    }

    /// What the backup says, until the stream ends; returns why it did.
    fn listen(
        &self,
        link: &Arc<Link>,
        reader: &mut (dyn io::Read + Send),
        orders: &Orders,
        told: &SyncSender<Answer>,
    ) -> String {
        loop {
            match link::receive(reader) {
                Ok((Frame::Ack { through, held_bytes }, _)) => link.acked(through, held_bytes),
                Ok((Frame::Committed { epoch }, _)) => self.committed(link, epoch, orders),
                Ok((Frame::NeedSync, _)) => self.shared.event(DiskEvent::NeedSync),
                Ok((Frame::Refuse, reason)) => return String::from_utf8_lossy(&reason).into_owned(),
                Ok((Frame::Hash { offset, len }, hash)) => {
                    // The copier has ended where a comparison asks.
                    if let Err(TrySendError::Full(_)) = told.try_send((offset, hash.clone())) {
                        return "the backup's disk says more than it was asked".into();
                    }
                    self.shared.hash_arrived(offset, len, &hash);
                }
                Ok((other, _)) => return format!("the backup sent {other:?}, which only a primary may"),
                Err(error) => return error.to_string(),
            }
        }
    }
}

/// Both introduce themselves. What does not fit is refused.
fn exchange(
    hello: &Hello,
    reader: &mut (dyn io::Read + Send),
    writer: &mut (dyn io::Write + Send),
) -> Result<(Hello, Bytes), JoinError> {
    let sent = link::send_now(writer, Frame::Hello, &hello.encode());
    let said = sent.map_err(Into::into).and_then(|()| link::receive(reader));
    let welcome = match said {
        Ok((Frame::Welcome, payload)) => payload,
        Ok((Frame::Refuse, reason)) => {
            return Err(JoinError::Refused(String::from_utf8_lossy(&reason).into_owned()));
        }
        Ok(_) => return Err(JoinError::NoGreeting),
        Err(error) => return Err(error.into()),
    };
    let (theirs, their_extents) = Hello::decode(&welcome)?;
    if theirs.size_bytes != hello.size_bytes {
        let error = JoinError::OtherSize {
            theirs: theirs.size_bytes,
            ours: hello.size_bytes,
        };
        let _gone = link::send_now(writer, Frame::Refuse, error.to_string().as_bytes());
        return Err(error);
    }
    Ok((theirs, Bytes::copy_from_slice(their_extents)))
}
