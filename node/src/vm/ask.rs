//! Asks a loop for something, from another thread, and waits for its answer.

use super::event::{Command, LoopEvent, LoopSender};
use crossbeam_channel::bounded;
use dunlin_api::Answer;

/// Answers under way to whoever asked. The loop gives one to each command; a comparison of disks, which tells its progress,
/// has a thread of its own and may wait.
const ANSWERS: usize = 64;

/// Asks the loop for something and waits for its answer.
pub fn command(to_loop: &LoopSender, command: Command) -> Answer {
    converse(to_loop, command, |_| {})
}

/// As [`command`]; what comes before the last answer goes to `each`.
pub fn converse(to_loop: &LoopSender, command: Command, mut each: impl FnMut(&Answer)) -> Answer {
    let (reply, answers) = bounded(ANSWERS);
    let ends = matches!(command, Command::Down { .. });
    to_loop.send(LoopEvent::Command(command, reply));
    for answer in answers {
        if answer.is_last() {
            return answer;
        }
        each(&answer);
    }
    // It ended before it came to this command.
    match (to_loop.is_vm_shut_down(), ends) {
        (true, true) => Answer::done("the VM is ended"),
        (true, false) => Answer::failed("the VM has just been shut down"),
        (false, _) => Answer::failed("the VM's loop has ended; see 'dunlin events'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

    #[test]
    fn whoever_asks_and_does_not_listen_costs_no_more_than_a_few_answers() {
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        let (go_on, waits) = bounded::<()>(0);
        let stuck = std::thread::spawn(move || {
            converse(&to_loop, Command::VerifyDisk { repair: false }, |_| {
                // It takes the first answer, and nothing more until it is let go; then all of them.
                let _ = waits.recv_timeout(PATIENCE);
            })
        });
        let Ok(LoopEvent::Command(_, reply)) = events.recv_timeout(PATIENCE) else {
            panic!("no command came");
        };
        reply.send(Answer::Alive).expect("it listens");
        while !reply.is_empty() {
            // Until it has the first one in its hand.
            std::thread::yield_now();
        }
        let taken = (0..10 * ANSWERS).take_while(|_| reply.try_send(Answer::Alive).is_ok());
        assert_eq!(taken.count(), ANSWERS);
        drop(go_on);
        reply.send(Answer::done("")).expect("it listens");
        assert!(matches!(stuck.join(), Ok(Answer::Done { .. })));
    }

    #[test]
    fn whoever_meets_the_vms_end_hears_of_it() {
        let down = Command::Down { now: true };
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        drop(events);
        // A loop that ended for another reason.
        assert!(matches!(command(&to_loop, down.clone()), Answer::Failed { .. }));
        to_loop.vm_is_shut_down();
        assert!(matches!(command(&to_loop, down), Answer::Done { .. }));
        assert!(matches!(
            command(&to_loop, Command::Failover),
            Answer::Failed { .. }
        ));
    }
}
