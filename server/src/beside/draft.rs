//! A version that a producer beside this server is about to publish: what it said of it so far, and whether that is true.

use crate::{Held, Staging};
use bytes::Bytes;
use std::{ops::Range, os::fd::OwnedFd, sync::Arc};
use tensor_relay_device::{AllocError, Charge, HostSource, Loan, Returned, Sealed};
use tensor_relay_protocol::{
    Limits, Manifest,
    beside::{Lend, Memory, MemoryKind, Refusal},
};
use tensor_relay_transport::egress::Payload;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The kinds of memory that this server takes.
pub(super) const TAKEN: &[MemoryKind] = &[MemoryKind::Memfd];

/// Why a version is refused, for the producer and for people.
pub(super) type Refused = (Refusal, String);

/// What was said of the next version. Holds at most one descriptor, and a manifest of at most the size that the server's
/// limits allow: whatever a producer says, and in whatever order.
#[derive(Debug, Default)]
pub(super) struct Draft {
    manifest: Vec<u8>,
    /// The share of these bytes in what all producers may have on the way.
    room: Option<OwnedSemaphorePermit>,
    memory: Option<Lent>,
    /// What is wrong with it already. The rest is passed over then, until it is published, and refused.
    wrong: Option<Refused>,
}

/// Shared memory, and which bytes of the payload it is said to hold.
#[derive(Debug)]
struct Lent {
    range: Range<u64>,
    offset: u64,
    descriptor: OwnedFd,
}

/// A version that is ready to be published.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) held: Held,
    /// Tells when nobody uses its memory any more.
    pub(super) returned: Returned,
}

/// The memory of one version, and its share of the server's budget. Gone together.
struct Owned {
    sealed: Sealed,
    _charge: Charge,
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        self.sealed.as_ref()
    }
}

impl Draft {
    /// Takes a part of the manifest.
    pub(super) fn handle_manifest(&mut self, part: &Bytes, limits: &Limits, room: &Arc<Semaphore>) {
        if self.wrong.is_some() {
            return;
        }
        let permits = u32::try_from(part.len()).unwrap_or(u32::MAX); // A message is smaller.
        let Ok(permit) = Arc::clone(room).try_acquire_many_owned(permits) else {
            let text = "too many manifests came that were not read yet: publish again when others are done";
            return self.refuse(Refusal::NoRoom, text.into());
        };
        match &mut self.room {
            Some(room) => room.merge(permit),
            None => self.room = Some(permit),
        }
        let max = limits.manifest_bytes as usize;
        match self.manifest.len() + part.len() > max {
            true => self.refuse(Refusal::BadManifest, format!("its manifest has more than {max} bytes")),
            false => self.manifest.extend_from_slice(part),
        }
    }

    /// Takes lent memory, with the descriptor that came with it.
    pub(super) fn handle_lend(&mut self, lend: Lend, descriptor: Option<OwnedFd>) {
        if self.wrong.is_some() {
            return;
        }
        let Lend { range, memory } = lend;
        match (memory, descriptor) {
            (Memory::Memfd { .. }, None) => {
                self.refuse(Refusal::UnfitMemory, "no descriptor came with the memfd that is lent".into());
            }
            (Memory::Memfd { .. }, Some(_)) if self.memory.is_some() => {
                self.refuse(
                    Refusal::UnfitMemory,
                    "the payload of a version lies in one memfd, and two came".into(),
                );
            }
            (Memory::Memfd { offset }, Some(descriptor)) => {
                self.memory = Some(Lent { range, offset, descriptor });
            }
            (other, _) => self.refuse(
                Refusal::UnsupportedMemory,
                format!("this server takes memory of the kind memfd, and it is of the kind {}", other.kind()),
            ),
        }
    }

    /// Checks what was said, maps the memory, and counts it within the server's budget.
    ///
    /// # Errors
    /// What is wrong with the version; nothing of it is kept then.
    pub(super) fn ready(self, staging: &Staging) -> Result<Ready, Refused> {
        if let Some(wrong) = self.wrong {
            return Err(wrong);
        }
        let manifest = Manifest::decode(self.manifest.into(), &staging.limits)
            .map_err(|error| (Refusal::BadManifest, error.to_string()))?;
        check_chunks(&manifest, staging)?;
        let (loan, returned) = Loan::new();
        let bytes = match (self.memory, manifest.payload_bytes()) {
            (None, 0) => loan.lend(Bytes::new()), // On loan as well: it is released when nobody can take it.
            (Some(lent), payload_bytes) if lent.range == (0..payload_bytes) => {
                loan.lend(map(&lent, staging)?)
            }
            (lent, payload_bytes) => return Err(not_all_of_it(lent.as_ref(), payload_bytes)),
        };
        let payload = Payload::new(Arc::new(manifest), Arc::new(HostSource::new(bytes)));
        // Nobody can write to it, and nobody waits to: so it may serve as long as what is staged.
        Ok(Ready { held: Held { payload, returned: None }, returned })
    }

    fn refuse(&mut self, reason: Refusal, text: String) {
        *self = Self { wrong: self.wrong.take().or(Some((reason, text))), ..Self::default() };
    }
}

fn check_chunks(manifest: &Manifest, staging: &Staging) -> Result<(), Refused> {
    let (found, wanted) = (manifest.chunk_bytes(), staging.chunk_bytes);
    match found == wanted {
        true => Ok(()),
        false => {
            let text = format!(
                "its manifest is for chunks of {found} bytes, and those of this server have {wanted}"
            );
            Err((Refusal::BadManifest, text))
        }
    }
}

fn not_all_of_it(lent: Option<&Lent>, payload_bytes: u64) -> Refused {
    let lent = match lent {
        Some(Lent { range, .. }) => format!("bytes {} to {}", range.start, range.end),
        None => "none".into(),
    };
    (
        Refusal::UnfitMemory,
        format!("its payload has {payload_bytes} bytes, of which {lent} were lent: lend all of them"),
    )
}

fn map(lent: &Lent, staging: &Staging) -> Result<Bytes, Refused> {
    let len = lent.range.end - lent.range.start;
    if lent.offset != 0 {
        let text =
            format!("the payload begins at byte {} of its memfd: lend one that begins with it", lent.offset);
        return Err((Refusal::UnfitMemory, text));
    }
    let sealed =
        Sealed::map(&lent.descriptor, len).map_err(|error| (Refusal::UnfitMemory, error.to_string()))?;
    let charge = charge(staging, len as usize).map_err(|error| (Refusal::NoRoom, error.to_string()))?;
    Ok(Bytes::from_owner(Owned { sealed, _charge: charge }))
}

/// Counts memory within the budget for staged versions. Bases give way to it.
fn charge(staging: &Staging, len: usize) -> Result<Charge, AllocError> {
    match staging.memory.charge(len) {
        Err(AllocError::OverBudget { .. }) if staging.bases.give_way() => staging.memory.charge(len),
        given => given,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: manifests of all producers together are bounded while they wait, and what was refused keeps nothing.
    #[test]
    fn manifests_that_wait_are_bounded() {
        let (room, part, limits) =
            (Arc::new(Semaphore::new(100)), Bytes::from(vec![0; 40]), Limits::default());
        let (mut one, mut two) = (Draft::default(), Draft::default());
        one.handle_manifest(&part, &limits, &room);
        two.handle_manifest(&part, &limits, &room);
        one.handle_manifest(&part, &limits, &room);
        assert!(matches!(one.wrong, Some((Refusal::NoRoom, _))) && two.wrong.is_none());
        assert_eq!((room.available_permits(), one.manifest.len()), (60, 0));
        one.handle_manifest(&part, &limits, &room);
        assert_eq!(one.manifest.len(), 0, "what is refused keeps nothing that follows");
        drop(two);
        assert_eq!(room.available_permits(), 100);
    }
}
