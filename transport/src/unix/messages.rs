//! Bytes and descriptors over a Unix socket, one system call at a time.

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// The maximum number of descriptors sent or received at once.
pub const DESCRIPTORS_MAX: usize = 4;

/// Why descriptors that the peer announced are not here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostDescriptors {
    /// This process has no free descriptor.
    #[error(
        "this process has no free descriptor for the one that the peer sent: raise its limit of open files (`ulimit -n`)"
    )]
    NoneFree,
    /// The peer sent too many at once.
    #[error("the peer sent more than {DESCRIPTORS_MAX} descriptors at once")]
    TooMany,
    /// The peer did not send them, or so many later ones that they were closed.
    #[error("no descriptors came with the message: the peer's system, or one between, does not pass them")]
    NotSent,
}

/// Receives available bytes into `part`, and the descriptors sent with them, which are closed if some of them are lost.
/// Returns the number of bytes, 0 at the end of the stream.
///
/// # Errors
/// Those of recvmsg(2), except interruptions.
pub fn receive(
    socket: impl AsFd,
    part: &mut [u8],
) -> io::Result<(usize, Result<Vec<OwnedFd>, LostDescriptors>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(part)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = vec![];
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let is_truncated = received.flags.contains(ReturnFlags::CTRUNC);
    let descriptors = match (descriptors.len(), is_truncated) {
        (0..=DESCRIPTORS_MAX, false) => Ok(descriptors),
        (0..DESCRIPTORS_MAX, true) => Err(LostDescriptors::NoneFree),
        _ => Err(LostDescriptors::TooMany), // Alignment may leave space for one more.
    };
    Ok((received.bytes, descriptors))
}

/// Sends a beginning of `bytes`, which must not be empty, and at most [`DESCRIPTORS_MAX`] `descriptors` with its first
/// byte. Returns the number of bytes sent.
///
/// # Errors
/// Those of sendmsg(2), except interruptions. `InvalidInput` for too many descriptors.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}
