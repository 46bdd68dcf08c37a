//! [`Descriptors`]: passes descriptors beside the bytes of a lane.

use rustix::{fs::fstat, io::Errno};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};
use tensor_relay_device::Lock;

use super::messages::{self, DESCRIPTORS_MAX, LostDescriptors};

/// The maximum number of batches that wait to be sent. Each is sent with a byte of its own at least: an `Announce`, which
/// names two digests, has more bytes than there may be batches before it.
const OUTGOING_MAX: usize = 64;

/// The maximum number of received batches that wait to be taken: as many as there may be messages about them in the
/// lane's buffers in practice. They have 256 descriptors at most, a quarter of the usual limit of a process.
const INCOMING_MAX: usize = 64;

/// Passes descriptors over a lane's Unix socket, from the server to the client. Cheap to clone.
///
/// They travel in batches. A batch arrives no later than any message that is queued after it; the message names the
/// inode of its first descriptor, by which the receiver [takes](Self::take) it.
#[derive(Debug, Clone, Default)]
pub struct Descriptors(Arc<Lock<State>>);

#[derive(Debug, Default)]
struct State {
    outgoing: VecDeque<Vec<OwnedFd>>,
    /// Why no more can be sent.
    why_not: Option<CannotPass>,
    /// The received batches, with the inodes of their first descriptors, oldest first.
    incoming: VecDeque<(u64, Vec<OwnedFd>)>,
    /// Why the last lost batch was lost.
    lost: Option<LostDescriptors>,
}

/// Why this process cannot pass descriptors. Bytes still get through.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("descriptors cannot be passed over the Unix socket: {0}")]
pub struct CannotPass(String);

impl Descriptors {
    /// Queues a batch of 1 to [`DESCRIPTORS_MAX`] descriptors. It is sent with the next bytes of
    /// the lane: queue a message about it afterwards. Never waits.
    ///
    /// # Errors
    /// [`CannotPass`]: forever if [`why_not`](Self::why_not) returns it too, otherwise because the peer has not read the
    /// batches before. The batch is closed.
    pub fn send(&self, batch: Vec<OwnedFd>) -> Result<(), CannotPass> {
        let mut state = self.0.lock();
        let why_not = match (&state.why_not, batch.len(), state.outgoing.len()) {
            (Some(why_not), ..) => why_not.clone(),
            (_, 1..=DESCRIPTORS_MAX, 0..OUTGOING_MAX) => {
                state.outgoing.push_back(batch);
                return Ok(());
            }
            (_, 1..=DESCRIPTORS_MAX, waiting) => {
                CannotPass(format!("{waiting} batches wait already, because the peer does not read"))
            }
            (_, wrong, _) => CannotPass(format!("a batch has 1 to {DESCRIPTORS_MAX} of them, not {wrong}")),
        };
        Err(why_not)
    }

    /// Why no more descriptors can be sent: this system refused some (gVisor, seccomp), or the lane
    /// has ended. A batch that was refused is closed, and the bytes were sent without it.
    pub fn why_not(&self) -> Option<CannotPass> {
        self.0.lock().why_not.clone()
    }

    /// Takes the received batch whose first descriptor has this `inode` (`st_ino` of fstat(2)). Call it when the message
    /// about the batch has arrived: a batch that is not here then never comes. The oldest of more than 64 batches that
    /// nobody takes is closed.
    ///
    /// # Errors
    /// [`LostDescriptors`], with the most probable reason.
    pub fn take(&self, inode: u64) -> Result<Vec<OwnedFd>, LostDescriptors> {
        let mut state = self.0.lock();
        let found = state.incoming.iter().position(|(first, _)| *first == inode);
        let batch = found.and_then(|index| state.incoming.remove(index));
        batch
            .map(|(_, batch)| batch)
            .ok_or_else(|| state.lost.take().unwrap_or(LostDescriptors::NotSent))
    }

    /// Whether a batch waits to be sent.
    pub(super) fn has_outgoing(&self) -> bool {
        !self.0.lock().outgoing.is_empty()
    }

    /// Sends a beginning of `bytes`, with the next batch if there is one. If the system refuses the batch, sends the bytes
    /// without it, and no later batch unless the refusal may pass.
    pub(super) fn send_next(&self, socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
        self.send_next_by(bytes, |bytes, batch| messages::send(&socket, bytes, batch))
    }

    /// As [`send_next`](Self::send_next), by a system call `send`.
    fn send_next_by(
        &self,
        bytes: &[u8],
        send: impl Fn(&[u8], &[BorrowedFd<'_>]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut state = self.0.lock();
        let Some(batch) = state.outgoing.pop_front() else { return send(bytes, &[]) };
        // Every batch before the bytes of a message has to go before them.
        let part = if state.outgoing.is_empty() { bytes } else { &bytes[..1] };
        let borrowed: Vec<_> = batch.iter().map(AsFd::as_fd).collect();
        match send(part, &borrowed) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                state.outgoing.push_front(batch);
                Err(error)
            }
            Err(refusal) => {
                if is_temporary(&refusal) {
                    return send(part, &[]); // Later batches still go before their messages.
                }
                let sent = send(bytes, &[]);
                if sent.is_ok() {
                    state.end(format!("the system refused: {refusal}"));
                }
                sent
            }
            sent => sent,
        }
    }

    /// Keeps what was received with some bytes.
    pub(super) fn handle_received(&self, received: Result<Vec<OwnedFd>, LostDescriptors>) {
        let batch = match received {
            Ok(batch) => batch,
            Err(lost) => {
                self.0.lock().lost = Some(lost);
                return;
            }
        };
        // A descriptor without an inode is none that a server sends.
        let Some(inode) = batch.first().and_then(|first| fstat(first).ok()).map(|found| found.st_ino) else {
            return;
        };
        let mut state = self.0.lock();
        state.incoming.push_back((inode, batch));
        if state.incoming.len() > INCOMING_MAX {
            state.incoming.pop_front();
        }
    }

    /// Closes what was not sent or taken: the lane's stream has ended.
    pub(super) fn end(&self) {
        let mut state = self.0.lock();
        state.end("the connection has ended".to_owned());
    }
}

impl State {
    /// Ends the sending.
    fn end(&mut self, why: String) {
        self.outgoing.clear();
        self.why_not.get_or_insert(CannotPass(why));
    }
}

/// Whether a later batch may pass: too many descriptors of this user wait in sockets, or memory is short.
fn is_temporary(refusal: &io::Error) -> bool {
    let temporary = [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM];
    temporary
        .iter()
        .any(|errno| refusal.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType};
    use std::{io::pipe, os::unix::net::UnixStream};

    fn batch() -> (u64, Vec<OwnedFd>) {
        let read = OwnedFd::from(pipe().unwrap().0);
        (fstat(&read).unwrap().st_ino, vec![read])
    }

    /// Goal: batches that were queued before a message arrive before its end, however long the write is.
    #[test]
    fn waiting_batches_go_before_a_message() {
        let (here, there) = UnixStream::pair().unwrap();
        let (sender, receiver) = (Descriptors::default(), Descriptors::default());
        let inodes: Vec<u64> = (0..OUTGOING_MAX)
            .map(|_| {
                let (inode, batch) = batch();
                sender.send(batch).unwrap();
                inode
            })
            .collect();
        let mut message = &[7; OUTGOING_MAX][..];
        while !message.is_empty() {
            let sent = sender.send_next(&here, message).unwrap();
            message = &message[sent..];
        }
        let mut read = 0;
        while read < OUTGOING_MAX {
            let mut part = [0; OUTGOING_MAX];
            let (bytes, descriptors) = messages::receive(&there, &mut part).unwrap();
            receiver.handle_received(descriptors);
            read += bytes;
        }
        for inode in inodes {
            assert_eq!(receiver.take(inode).unwrap().len(), 1);
        }
    }

    /// Goal: where the system refuses descriptors, bytes are sent without them, and the reason is known. Method: a netlink
    /// socket, which passes none.
    #[test]
    fn bytes_are_sent_where_descriptors_are_refused() {
        let refusing = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None).unwrap();
        let sender = Descriptors::default();
        for _ in 0..2 {
            sender.send(batch().1).unwrap();
        }
        assert_eq!(sender.send_next(&refusing, b"bytes").unwrap(), 5);
        assert!(!sender.has_outgoing());
        let why_not = sender.why_not().unwrap();
        assert!(why_not.to_string().contains("the system refused"), "{why_not}");
        assert_eq!(sender.send(batch().1), Err(why_not));
    }

    /// Goal: a refusal that may pass costs one batch: its bytes are sent, and later batches go before theirs. Method: a
    /// system that refuses the second of three batches, for each such reason; one for good; and one that is full meanwhile.
    #[test]
    fn a_refusal_that_passes_costs_one_batch() {
        let refused = |errno: Errno, message: &[u8]| {
            let sender = Descriptors::default();
            for _ in 0..3 {
                sender.send(batch().1).unwrap();
            }
            let calls = std::cell::RefCell::new(vec![]);
            let mut rest = message;
            while !rest.is_empty() {
                let sent = sender.send_next_by(rest, |bytes, batch| {
                    calls.borrow_mut().push((bytes.len(), batch.len()));
                    if calls.borrow().len() == 2 { Err(errno.into()) } else { Ok(bytes.len()) }
                });
                match sent {
                    Ok(sent) => rest = &rest[sent..],
                    Err(error) => assert_eq!(error.raw_os_error(), Some(Errno::AGAIN.raw_os_error())),
                }
            }
            (calls.into_inner(), sender.why_not().is_none())
        };
        for errno in [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM] {
            let calls = vec![(1, 1), (1, 1), (1, 0), (6, 1)];
            assert_eq!(refused(errno, b"messages"), (calls, true), "{errno}");
        }
        assert_eq!(refused(Errno::PERM, b"messages"), (vec![(1, 1), (1, 1), (7, 0)], false));
        assert_eq!(refused(Errno::AGAIN, b"messages"), (vec![(1, 1), (1, 1), (1, 1), (6, 1)], true));
    }
}
