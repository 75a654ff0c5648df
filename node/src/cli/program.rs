//! `program`: a bare server program, without a VM. So far: do copies of it say the same?

use clap::{Args, Subcommand, ValueEnum};
use dunlin_core::program::order::Order;
use dunlin_program::check;
use dunlin_program::copy::Inside;
use dunlin_program::options::{self, Clients, Options};
use dunlin_program::report::Verdict;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[derive(Subcommand)]
pub(super) enum Command {
    /// Runs copies of a server on this host, gives them the same inputs in the same order, and says whether their answers are the same
    #[command(after_help = EXAMPLES)]
    Check(Box<Check>),
    /// Keeps one copy; only `check` starts it
    #[command(hide = true)]
    Inside,
}

const EXAMPLES: &str = "\
Examples:
  dunlin program check --client 'redis-benchmark -h $SERVER -t incr -c 50 -n 20000 -q' -- redis-server --protected-mode no --save ''
  dunlin program check --client 'wget -qO- http://$SERVER/' --port 80 -- nginx -g 'daemon off;'
  dunlin program check --order delivery --clock agreed -- my-server --listen 0.0.0.0:8080     then speak to 10.213.0.2:8080

What the copies write to files stays in memory, and is gone when they end. Each copy has its own network, processes, shared memory and host name.

Exit codes: 0 all copies gave the same answers; 1 they did not; 2 there is no result: bad input, or a program or client that failed.";

#[derive(Args)]
pub(super) struct Check {
    /// How many copies to run
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=16))]
    copies: u8,
    /// What the next input waits for
    #[arg(long, value_enum, default_value_t = OrderName::Read)]
    order: OrderName,
    /// The longest that it waits for that, in milliseconds. A program may refuse to read, and need not answer
    #[arg(long, default_value_t = 50, value_name = "MS")]
    patience_ms: u64,
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    network: Network,
    /// The user that the program runs as (root only)
    #[arg(long)]
    user: Option<String>,
    /// How much each copy may write to files, which are kept in memory
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    scratch_mib: u32,
    /// How long the program may take until it listens
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    start_within: u64,
    /// End after this many seconds, at the latest
    #[arg(long)]
    seconds: Option<u64>,
    /// The folder for all that the copies print: copy-1.log, copy-2.log
    #[arg(long, value_name = "FOLDER")]
    logs: Option<PathBuf>,
    /// Print the report as JSON, one object on one line
    #[arg(long)]
    json: bool,
    /// The program and its arguments. It has to stay in the foreground
    #[arg(last = true, required = true, value_name = "CMD")]
    program: Vec<String>,
}

/// Where what differs between two runs of a program comes from.
#[derive(Args)]
struct Sources {
    /// Where the copies' time comes from. Agreed time stands still between inputs, and ticks every 10 ms while none comes
    #[arg(long, value_enum, default_value_t = Source::Own)]
    clock: Source,
    /// Where their random bytes come from: getrandom, /dev/urandom, the bytes at a program's start
    #[arg(long, value_enum, default_value_t = Source::Own)]
    chance: Source,
    /// Say whether the program reads the processor's own clock (RDTSC, RDTSCP), and where: no service can make that the same in all copies. With
    /// an agreed clock, it counts the nanoseconds of the agreed time. Each read is trapped and answered, which takes about 0.1 ms
    #[arg(long)]
    tsc: bool,
    /// The seed of agreed random bytes. If it is not given, each run has another one, which it prints
    #[arg(long, value_name = "NUMBER", requires = "chance")]
    seed: Option<u64>,
}

/// Who speaks to the copies, and where.
#[derive(Args)]
struct Network {
    /// A shell command that speaks to the copies, in a network of its own: $SERVER is their address, $PORT the value of --port.
    /// The run ends when the command ends. Without it, whoever can reach the address speaks to them, until Ctrl-C
    #[arg(long, value_name = "COMMAND", conflicts_with = "bridge")]
    client: Option<String>,
    /// The TCP port that the clients wait for; any port if it is not given
    #[arg(long)]
    port: Option<u16>,
    /// The copies' address and network
    #[arg(long, default_value = "10.213.0.2/24", value_name = "ADDRESS/BITS", value_parser = options::network)]
    address: (Ipv4Addr, u8),
    /// Clients come from this bridge of the host (root only). Give the copies a free address of its network
    #[arg(long)]
    bridge: Option<String>,
    /// The copies' default gateway
    #[arg(long, value_name = "ADDRESS")]
    gateway: Option<Ipv4Addr>,
}

#[derive(Clone, Copy, ValueEnum)]
enum OrderName {
    /// It waits for nothing: only the order of delivery is agreed
    Delivery,
    /// It waits until every copy has read the last input
    Read,
    /// It waits like 'read' for the last input of its own connection; inputs of several connections may be unread together. For a program with
    /// one thread in epoll
    Batch,
    /// It waits until every copy has answered the last input
    Answer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Source {
    /// Each copy's own
    Own,
    /// The same for all copies
    Agreed,
}

/// Runs it: the exit code says what came of it.
pub(super) fn run(command: Command) -> ExitCode {
    let check = match command {
        Command::Inside => return dunlin_program::inside::main(),
        Command::Check(check) => check,
    };
    match run_check(*check) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("dunlin: {}", super::one_line(&error));
            ExitCode::from(2)
        }
    }
}

fn run_check(arguments: Check) -> anyhow::Result<ExitCode> {
    let json = arguments.json;
    let mut say = move |line: &str| eprintln!("dunlin: {line}");
    let options = options_of(arguments, &mut say)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let report = check::run(&options, &stop, &mut say)?;
    if json {
        println!("{}", report.json());
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::from(match report.verdict() {
        Verdict::Equal => 0,
        Verdict::Different => 1,
        Verdict::Nothing => 2,
    }))
}

fn options_of(arguments: Check, say: &mut dyn FnMut(&str)) -> anyhow::Result<Options> {
    let seed = (arguments.sources.chance == Source::Agreed)
        .then(|| arguments.sources.seed.unwrap_or_else(fresh_seed));
    if let Some(seed) = seed {
        say(&format!("agreed chance: --seed {seed} repeats it"));
    }
    let (address, prefix) = arguments.network.address;
    let clients = match (arguments.network.client, arguments.network.bridge) {
        (Some(command), _) => Clients::Command(command),
        (None, Some(bridge)) => Clients::Bridge(bridge),
        (None, None) => Clients::Host(options::neighbour(address)),
    };
    Ok(Options {
        inside: Inside {
            program: PathBuf::from("/proc/self/exe"),
            arguments: vec!["program".into(), "inside".into()],
        },
        command: arguments.program,
        directory: std::env::current_dir()?,
        environment: std::env::vars().collect(),
        copies: arguments.copies.into(),
        order: match arguments.order {
            OrderName::Delivery => Order::Delivery,
            OrderName::Read => Order::Read,
            OrderName::Batch => Order::Batch,
            OrderName::Answer => Order::Answer,
        },
        patience: Duration::from_millis(arguments.patience_ms),
        user: arguments.user.as_deref().map(options::user).transpose()?,
        scratch_mib: arguments.scratch_mib,
        agreed_clock: arguments.sources.clock == Source::Agreed,
        agreed_chance: seed,
        tells_tsc: arguments.sources.tsc,
        port: arguments.network.port,
        start_within: Duration::from_secs(arguments.start_within),
        clients,
        address,
        prefix,
        gateway: arguments.network.gateway,
        most: arguments.seconds.map(Duration::from_secs),
        logs: arguments.logs,
    })
}

/// Another one in each run.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}
