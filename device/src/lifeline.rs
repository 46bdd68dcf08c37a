use std::{
    future::pending,
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, fstat},
};

use tokio::{io::Interest, net::unix::pipe};

/// Whether a descriptor is a pipe, as the taker's end of a lifeline is. Why: it was named by the lender, who may send any
/// other one; reading from that could wait.
pub fn is_lifeline(taken: &impl AsFd) -> bool {
    fstat(taken).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Fifo)
}

/// Whether the lender still has its end of the lifeline whose other end is `taken`. Why: memory that nothing but the
/// lender keeps ends with it; what was copied out of it counts only if the lender was there to the end.
pub fn lender_is_alive(taken: impl AsFd) -> bool {
    // Nothing is read, and no flag is set: other processes may have the same end.
    let mut end = [PollFd::new(&taken, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut end, Some(&at_once)).is_ok() && end[0].revents().is_empty()
}

/// Tells the lender of memory when no process has it any more, whatever happened to the taker and its connection.
///
/// A pipe, of which the taker gets the reading end with the memory, and keeps it as long as it has a view. The kernel
/// closes that end when the last process that has it is gone: after a crash, and not before a forked child ends. The
/// lender only asks whether its own end has readers: nobody can send anything through the end that was given away.
///
/// Costs a few system calls, and one descriptor in each process. A taker that is hostile can close its end and keep the
/// memory; it then sees what is written there later ([`SharedRange::retire`](crate::SharedRange::retire)).
#[derive(Debug)]
pub struct Lifeline(pipe::Sender);

impl Lifeline {
    /// Makes a lifeline, and the end that goes to the taker: send it, and drop it. Fails without free descriptors.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let (taker, lender) = io::pipe()?;
        Ok((Self(pipe::Sender::from_owned_fd(lender.into())?), taker.into()))
    }

    /// Resolves when no process has the taker's end any more. This waits for the taker: use a deadline. Cancel safe.
    pub async fn ended(&self) {
        if self.0.ready(Interest::ERROR).await.is_err() {
            pending().await // The runtime ends, and this task with it.
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Duration};

    use tokio::time::timeout;

    use super::*;

    /// Goal: the lifeline ends with the last process that has it, however that ends, and not before; a taker cannot end or
    /// disturb it by sending.
    #[tokio::test]
    async fn a_lifeline_ends_with_the_last_process() {
        let (lifeline, end) = Lifeline::new().unwrap();
        assert!(rustix::io::write(&end, b"x").is_err());
        // They read, and so end with the lender, too.
        let taker = || Command::new("cat").stdin(end.try_clone().unwrap()).spawn().unwrap();
        let mut takers = [taker(), taker()];
        drop(end);
        for taker in &mut takers {
            assert!(timeout(Duration::ZERO, lifeline.ended()).await.is_err());
            taker.kill().unwrap();
            taker.wait().unwrap();
        }
        let (lifeline_of_other, end) = Lifeline::new().unwrap();
        assert!(lender_is_alive(&end));
        assert!(!rustix::fs::fcntl_getfl(&end).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
        drop(lifeline_of_other);
        assert!(!lender_is_alive(&end));
        for _ in 0..2 {
            timeout(Duration::from_secs(60), lifeline.ended()).await.unwrap();
        }
    }
}
