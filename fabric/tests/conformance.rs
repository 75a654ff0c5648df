//! Every backend against the one suite.

use dunlin_fabric::keys::{make_ca, make_host};
use dunlin_fabric::link::{Auth, Hello, Identity, Listener, Purpose, Stream, connect};
use dunlin_fabric::transport::conformance::{self, Bed, Lies, Lying};
use dunlin_fabric::transport::{self, Transport};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

struct Unix;

impl Bed for Unix {
    fn name(&self) -> String {
        "shm".into()
    }
    fn pair(&mut self) -> (Box<dyn Transport>, Box<dyn Transport>) {
        let (a, b) = Stream::pair().unwrap();
        (transport::over(a).unwrap(), transport::over(b).unwrap())
    }
    fn streams(&mut self) -> Option<(Stream, Stream)> {
        Some(Stream::pair().unwrap())
    }
}

struct Plain;

impl Bed for Plain {
    fn name(&self) -> String {
        "tcp".into()
    }
    fn pair(&mut self) -> (Box<dyn Transport>, Box<dyn Transport>) {
        let (a, b) = self.streams().unwrap();
        (transport::over(a).unwrap(), transport::over(b).unwrap())
    }
    fn streams(&mut self) -> Option<(Stream, Stream)> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (b, _) = listener.accept().unwrap();
        a.set_nodelay(true).unwrap();
        b.set_nodelay(true).unwrap();
        Some((Stream::unprotected(a, "b"), Stream::unprotected(b, "a")))
    }
}

struct Tls {
    a: Identity,
    b: Identity,
}

impl Tls {
    fn new() -> Self {
        let ca = make_ca("test").unwrap();
        let identity = |name: &str| {
            let k = make_host(&ca, name).unwrap();
            let auth = Auth::Tls {
                cert_pem: k.cert_pem,
                key_pem: k.key_pem,
                ca_pem: ca.keys.cert_pem.clone(),
                crl_pem: None,
            };
            Identity::new([1; 16], name, &[], Some(auth)).unwrap()
        };
        Self {
            a: identity("a"),
            b: identity("b"),
        }
    }
}

impl Bed for Tls {
    fn name(&self) -> String {
        "tcp+tls".into()
    }
    fn pair(&mut self) -> (Box<dyn Transport>, Box<dyn Transport>) {
        let (a, b) = self.streams().unwrap();
        (transport::over(a).unwrap(), transport::over(b).unwrap())
    }
    fn streams(&mut self) -> Option<(Stream, Stream)> {
        let listener = Listener::bind("127.0.0.1:0", self.a.clone()).unwrap();
        let hello = Hello::new("vm", "a", Purpose::Log);
        let (_, b) = connect(listener.local_addr(), &self.b, &hello, Duration::from_secs(60)).unwrap();
        let (_, a) = listener.accept().unwrap();
        Some((a, b))
    }
}

#[test]
fn shm_keeps_the_invariants() {
    conformance::run(&mut Unix);
}

#[test]
fn tcp_keeps_the_invariants() {
    conformance::run(&mut Plain);
}

#[test]
fn tcp_with_tls_keeps_the_invariants() {
    conformance::run(&mut Tls::new());
}

struct Liar {
    lies: Lies,
    seed: u64,
}

impl Bed for Liar {
    fn name(&self) -> String {
        format!("lying, {:?}, seed {}", self.lies, self.seed)
    }
    fn pair(&mut self) -> (Box<dyn Transport>, Box<dyn Transport>) {
        let (a, b) = Lying::pair(self.lies, self.seed);
        (Box::new(a), Box::new(b))
    }
    fn streams(&mut self) -> Option<(Stream, Stream)> {
        None
    }
}

#[test]
fn rings_and_words_believe_nothing_wrong_on_a_fabric_that_lies() {
    for seed in 0..8 {
        for lies in [
            Lies {
                tear: true,
                ..Lies::default()
            },
            Lies {
                tear: true,
                repeat: true,
                ..Lies::default()
            },
            Lies {
                tear: true,
                repeat: true,
                stall: true,
            },
        ] {
            let bed = &mut Liar { lies, seed };
            println!("{}", bed.name());
            conformance::entries_are_believed_only_whole(bed, 300);
            conformance::a_full_ring_pushes_back(bed);
            conformance::stale_writes_are_never_read(bed);
        }
    }
}
