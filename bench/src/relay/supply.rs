//! What is sent in each round: bytes that are in memory once, as a version that nobody has seen.

use super::Goods;
use anyhow::Result;
use std::{convert::Infallible, sync::Arc};
use tensor_relay_device::{AllocError, HostMemory, HostSource, Source};
use tensor_relay_protocol::{ChunkHash, Manifest};
use tensor_relay_server::{
    Borrowed, Publication, Publisher, Server, Staging, TensorSpec, Topic, TopicOptions,
};

/// The bytes, staged and hashed before the first round.
pub(super) struct Supply {
    staging: Staging,
    specs: Vec<TensorSpec>,
    source: Arc<dyn Source>,
    hashes: Vec<ChunkHash>,
}

/// A version for one round, in a topic of its own. A version of a topic that is subscribed to already would be sent to
/// whoever has just finished the one before.
pub(super) struct Offer {
    publisher: Publisher,
    pub(super) publication: Publication,
}

impl Supply {
    /// Makes what `goods` say. Takes a pass over so many `bytes`, and one more to hash them.
    ///
    /// # Errors
    /// When there is no memory, or the bytes cannot be such tensors.
    pub(super) fn new(staging: Staging, bytes: u64, goods: &Goods) -> Result<Self> {
        let specs = goods.data.specs(bytes, goods.tensors)?;
        let mut made = None;
        Borrowed::from_hashed_source(&staging, specs.clone(), vec![], |manifest| {
            let (source, hashes) = fill(manifest, goods)?;
            made = Some((Arc::clone(&source), hashes.clone()));
            Ok::<_, AllocError>((source, hashes))
        })?;
        let (source, hashes) = made.expect("a version is made of what the function above has filled");
        Ok(Self { staging, specs, source, hashes })
    }

    /// Publishes it for this round. Costs some microseconds: nothing is copied, and nothing hashed. What earlier rounds
    /// chose for its chunks, and encoded of them, is not found again, since it was of another version.
    ///
    /// # Errors
    /// When the topic of the round is there already.
    pub(super) async fn offer(&self, server: &Server, round: u32) -> Result<Offer> {
        let made = || Ok::<_, Infallible>((Arc::clone(&self.source), self.hashes.clone()));
        let version = Borrowed::from_hashed_source(&self.staging, self.specs.clone(), vec![], |_| made())?;
        // There is one version of each topic, so that nobody needs a copy of it.
        let options = TopicOptions { bases: 0, ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic(round)?, None, options)?;
        let publication = publisher.publish(version, vec![]).await?;
        Ok(Offer { publisher, publication })
    }
}

impl Offer {
    /// Takes it back.
    pub(super) fn withdraw(self) {
        self.publisher.withdraw();
    }
}

/// What is subscribed to in this round.
///
/// # Errors
/// None: the name is one that topics may have.
pub(super) fn topic(round: u32) -> Result<Topic> {
    Ok(Topic::new(&format!("bulk/{round}"))?)
}

/// The payload that is laid out so, and the hash of each chunk.
fn fill(manifest: &Manifest, goods: &Goods) -> Result<(Arc<dyn Source>, Vec<ChunkHash>), AllocError> {
    let in_memory = |range: std::ops::Range<u64>| range.start as usize..range.end as usize;
    let mut region = HostMemory::new(u64::MAX).allocate(manifest.payload_bytes() as usize)?;
    region.fill(0);
    for (number, tensor) in manifest.tensors().iter().enumerate() {
        goods.data.fill(number, &mut region[in_memory(tensor.range())]);
    }
    let bytes = region.freeze();
    let chunks = manifest.chunking().iter();
    let hashes = chunks.map(|(_, range)| ChunkHash::of(&bytes[in_memory(range)])).collect();
    Ok((Arc::new(HostSource::new(bytes)), hashes))
}
