//! [`Takers`]: versions in memory that clients of this host map.

mod host_copy;
mod made_once;
mod on_gpu;

use crate::{
    gauge::{Counted, Gauge},
    retained::Retained,
    staged::Staging,
};
use host_copy::HostCopy;
use on_gpu::{GpuCopies, SharedOnGpu};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{Arc, OnceLock, Weak},
};
use tensor_relay_device::{Lifeline, Lock, NotShared, SharedRange, Source, descriptors_are_scarce};
use tensor_relay_protocol::{Lending, Lent, NotLent, VersionDigest, WantedGpu};
use tensor_relay_transport::{Workers, sending::Loan};

/// The size below which a version is sent, which costs less than to map it.
const LENT_BYTES_MIN: u64 = 64 << 10;

/// The versions for which there has to be room beside a lent one.
const VERSIONS_FREE: u64 = 3;

/// The most loans of a session at once: each costs a descriptor of the server.
const LOANS_MAX: u64 = 64;

/// The versions whose memory clients of this host map.
///
/// With the memory a client receives one end of a [`Lifeline`]. The kernel closes it when the last process that can have
/// the memory mapped has dropped it or is gone, whatever became of the connection: the client was killed, is stopped, or
/// has forked. Until then the version stays in memory, and its pages are not used for another one.
#[derive(Debug)]
pub(crate) struct Takers {
    /// The memory of versions that are staged here, and of host copies. Forwarded versions lie in a client's, and
    /// published ones may lie in their producer's.
    staging: Staging,
    /// The lent versions, by the key of their payload.
    lent: Lock<BTreeMap<u64, LentVersion>>,
    /// The copies on GPUs.
    copies: Arc<GpuCopies>,
}

#[derive(Debug)]
struct LentVersion {
    bytes: u64,
    /// The number of loans.
    loans: usize,
}

/// The client of a session, as one that maps memory.
#[derive(Debug, Clone)]
pub(crate) struct Taker {
    /// What its session has.
    pub(crate) loans: Loans,
    /// Whether memory that it was lent may be used for other versions: it may subscribe to all of them, and its user can
    /// read the server's memory in any case.
    pub(crate) is_trusted: bool,
}

/// The copies of a version on a GPU that clients of this host have: none, until one of them needs one.
#[derive(Debug, Default)]
pub(crate) struct Copies(OnceLock<Box<MadeCopies>>);

/// Copies, each of which may be made.
#[derive(Debug, Default)]
struct MadeCopies {
    host: HostCopy,
    on_gpu: SharedOnGpu,
}

impl Copies {
    fn get(&self) -> &MadeCopies {
        self.0.get_or_init(Box::default)
    }
}

/// What is lent to a session.
#[derive(Debug, Clone, Default)]
pub(crate) struct Loans {
    /// The versions that it maps.
    maps: Gauge,
    /// The copies on GPUs that were made for it.
    copies: Gauge,
}

impl Takers {
    /// Lends versions in the memory of `staging`; with `share_gpu`, also memory of GPUs that several clients have.
    pub(crate) fn new(staging: &Staging, share_gpu: bool) -> Self {
        Self { staging: staging.clone(), lent: Lock::default(), copies: Arc::new(GpuCopies::new(share_gpu)) }
    }

    /// Lends a version to `taker`, which knows what it selects of it by `digest`. Costs a few system calls.
    ///
    /// A version on the GPU that the client named is copied there for it. For all other clients, a version on a GPU is
    /// copied to host memory once: those of other GPUs copy it up from there.
    ///
    /// A client can keep the memory as long as it likes, so a version is lent only while there is room for three more: the
    /// next one on its way to the same client, which may be stopped, the one on offer, and a new one. So takers stop no
    /// publisher. A client can also hide a descriptor, and sees what is written to that memory later: versions of other
    /// topics, or after its right has ended. So memory that was lent to a taker who is not trusted is not used for another
    /// version, but returned to the system.
    ///
    /// # Errors
    /// [`NotLent`], if its bytes have to be sent.
    pub(crate) async fn lend(
        self: &Arc<Self>,
        version: &Arc<Retained>,
        digest: VersionDigest,
        gpu: Option<Result<WantedGpu, NotLent>>,
        taker: &Taker,
    ) -> Result<Loan, NotLent> {
        if version.payload.manifest().payload_bytes() < LENT_BYTES_MIN {
            return Err(NotLent::Small);
        }
        let why_not_gpu = match (version.payload.source().on_device(), gpu) {
            (None, _) | (_, None) => None,
            (Some(_), Some(Err(declined))) => Some(declined),
            (Some(on_device), Some(Ok(wanted))) => {
                match self.copies.lend(version, on_device, wanted, digest, taker).await {
                    Ok(loan) => return Ok(loan),
                    Err(why_not) => Some(why_not),
                }
            }
        };
        let shared = self.shared(version).await?;
        if taker.loans.maps.get() >= LOANS_MAX {
            return Err(NotLent::Full);
        }
        let (lifeline, taken) = Lifeline::new().map_err(|_| NotLent::NoDescriptors)?;
        let memory = shared.descriptor().try_clone_to_owned().map_err(|_| NotLent::NoDescriptors)?;
        if descriptors_are_scarce(&memory) {
            return Err(NotLent::NoDescriptors);
        }
        let loan = self.count(version, &shared, taker).ok_or(NotLent::Full)?;
        if !taker.is_trusted {
            shared.retire();
        }
        tokio::spawn(hold(loan, lifeline));
        let lent = Lent { inode: shared.inode(), offset_bytes: shared.offset_bytes(), digest, why_not_gpu };
        Ok(Loan { lending: Lending::Memory(lent), descriptors: vec![memory, taken] })
    }

    /// The memory of a version that clients can map.
    async fn shared(&self, version: &Retained) -> Result<SharedRange, NotLent> {
        let source = version.payload.source();
        let shared = match source.on_device() {
            None => source.shared(),
            Some(_) => version.copies.get().host.get(version, &self.staging).await?.shared(),
        };
        shared.map_err(|why| match why {
            NotShared::Refused => NotLent::NoMemfd,
            NotShared::Private => NotLent::NotShareable,
        })
    }

    /// The bytes of the versions that clients map, and of copies for them on GPUs.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.lent.lock().values().map(|lent| lent.bytes).sum::<u64>() + self.copies.bytes()
    }

    /// Counts a loan of `version`; `None` if there is no room for it.
    fn count(
        self: &Arc<Self>,
        version: &Arc<Retained>,
        shared: &SharedRange,
        taker: &Taker,
    ) -> Option<LoanOf> {
        let (bytes, memory) =
            (shared.len_bytes(), shared.memory().unwrap_or_else(|| self.staging.memory.clone()));
        let key = version.payload.key();
        let needed_bytes = bytes
            .saturating_mul(VERSIONS_FREE)
            .saturating_sub(self.staging.bases.stats().bytes);
        // Not under the lock, since it reads files.
        if !self.lent.lock().contains_key(&key) && !memory.has_room(needed_bytes) {
            return None;
        }
        let mut lent = self.lent.lock();
        lent.entry(key).or_insert(LentVersion { bytes, loans: 0 }).loans += 1;
        drop(lent);
        let (version, takers, shared) = (Arc::clone(version), Arc::clone(self), shared.clone());
        Some(LoanOf { version, shared, takers, _counted: taker.loans.maps.count(), is_over: false })
    }
}

/// Puts huge pages in the place of the small ones of a version's memory, in the background, if it has any and clients can
/// map it.
pub(crate) fn begin_enlarging(version: Weak<Retained>) {
    let next = move || {
        let shared = version.upgrade().and_then(|version| version.payload.source().shared().ok());
        shared.is_some_and(|shared| shared.enlarge_next_pages())
    };
    let _ = Workers::spawn_idle("relay-pages", move || while next() {}); // Otherwise clients read more slowly at first.
}

/// A loan of a version.
#[derive(Debug)]
struct LoanOf {
    version: Arc<Retained>,
    shared: SharedRange,
    takers: Arc<Takers>,
    _counted: Counted,
    /// Whether nobody has the memory any more.
    is_over: bool,
}

impl Drop for LoanOf {
    fn drop(&mut self) {
        if !self.is_over {
            self.shared.retire(); // The runtime ends, and this process may go on to use the memory.
        }
        if let Entry::Occupied(mut entry) = self.takers.lent.lock().entry(self.version.payload.key()) {
            entry.get_mut().loans -= 1;
            if entry.get().loans == 0 {
                entry.remove();
            }
        }
    }
}

/// Holds a version until no process has the other end of its lifeline.
async fn hold(mut loan: LoanOf, lifeline: Lifeline) {
    lifeline.ended().await;
    loan.is_over = true;
}
