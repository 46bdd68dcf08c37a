//! The versions of each round: bytes that are in memory once, published as a new version.

use super::{Hold, PayloadArgs};
use anyhow::Result;
use bytes::Bytes;
use std::{convert::Infallible, sync::Arc};
use tensor_relay_device::{AllocError, HostMemory, HostSource, Source};
use tensor_relay_protocol::{ChunkHash, Manifest};
use tensor_relay_server::{
    Borrowed, Publication, Publishable, Publisher, Server, Staging, TensorSpec, Topic, TopicOptions,
};

/// The bytes, staged and hashed before the first round.
pub(super) struct RoundPublisher {
    staging: Staging,
    specs: Vec<TensorSpec>,
    payload: Payload,
    hold: Hold,
}

/// The bytes of all tensors, as they are laid out.
#[derive(Clone)]
struct Payload {
    /// Those of each tensor.
    tensors: Vec<Bytes>,
    source: Arc<dyn Source>,
    hashes: Vec<ChunkHash>,
}

/// A version for one round, in a topic of its own. A version of a topic that is subscribed to already would be sent to
/// whoever has just finished the one before.
pub(super) struct PublishedRound {
    publisher: Publisher,
    pub(super) publication: Publication,
}

impl RoundPublisher {
    /// Makes what `args` say. Takes a pass over so many `bytes`, and one more to hash them.
    ///
    /// # Errors
    /// When there is no memory, or the bytes cannot be such tensors.
    pub(super) fn new(staging: Staging, bytes: u64, args: &PayloadArgs) -> Result<Self> {
        let specs = args.data.specs(bytes, args.tensors)?;
        let mut made = None;
        Borrowed::from_hashed_source(&staging, specs.clone(), vec![], |manifest| {
            let payload = fill(manifest, args)?;
            made = Some(payload.clone());
            Ok::<_, AllocError>((payload.source, payload.hashes))
        })?;
        let payload = made.expect("a version is made of what the function above has filled");
        Ok(Self { staging, specs, payload, hold: args.hold })
    }

    /// Publishes it for this round. Costs some microseconds: nothing is copied, nor hashed before it is sent. What earlier rounds
    /// chose for its chunks, and encoded of them, is not found again, since it was of another version.
    ///
    /// # Errors
    /// When the topic of the round is there already.
    pub(super) async fn publish(&self, server: &Server, round: u32) -> Result<PublishedRound> {
        let version = self.version()?;
        // There is one version of each topic, so that nobody needs a copy of it.
        let options = TopicOptions { bases: 0, ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic(round)?, None, options)?;
        let publication = publisher.publish(version, vec![]).await?;
        Ok(PublishedRound { publisher, publication })
    }
}

impl RoundPublisher {
    fn version(&self) -> Result<Publishable> {
        let (staging, specs) = (&self.staging, self.specs.clone());
        let Payload { tensors, source, hashes } = self.payload.clone();
        Ok(match self.hold {
            Hold::Stage => Borrowed::from_hashed_source(staging, specs, vec![], |_| {
                Ok::<_, Infallible>((source, hashes))
            })?,
            Hold::Borrow => {
                Borrowed::from_tensors(staging, specs.into_iter().zip(tensors).collect(), vec![])?
            }
        }
        .into())
    }
}

impl PublishedRound {
    /// Takes it back.
    pub(super) fn withdraw(self) {
        self.publisher.withdraw();
    }
}

/// The topic of this round.
///
/// # Errors
/// None: the name is one that topics may have.
pub(super) fn topic(round: u32) -> Result<Topic> {
    Ok(Topic::new(&format!("bulk/{round}"))?)
}

/// The payload that is laid out so, and the hash of each chunk.
fn fill(manifest: &Manifest, args: &PayloadArgs) -> Result<Payload, AllocError> {
    let in_memory = |range: std::ops::Range<u64>| range.start as usize..range.end as usize;
    let mut region = HostMemory::new(u64::MAX).allocate(manifest.payload_bytes() as usize)?;
    region.fill(0);
    for (number, tensor) in manifest.tensors().iter().enumerate() {
        args.data.fill(number, &mut region[in_memory(tensor.range())]);
    }
    let bytes = region.freeze();
    let chunks = manifest.chunking().iter();
    let hashes = chunks.map(|(_, range)| ChunkHash::of(&bytes[in_memory(range)])).collect();
    let tensors = manifest
        .tensors()
        .iter()
        .map(|tensor| bytes.slice(in_memory(tensor.range())))
        .collect();
    Ok(Payload { tensors, source: Arc::new(HostSource::new(bytes)), hashes })
}
