//! The publisher of the payload, which is a new version in each round, from one copy in memory.

use super::{Form, Hold, Load, PayloadArgs, load::OpenLoad};
use anyhow::Result;
use bytes::Bytes;
use std::{convert::Infallible, io, sync::Arc};
use tensor_relay_device::{HostMemory, HostSource, Source};
use tensor_relay_protocol::{ChunkHash, Manifest};
use tensor_relay_server::{
    Borrowed, Publication, Publishable, Publisher, Server, Staging, TensorSpec, Topic, TopicOptions,
};

/// A publisher of the payload, which is laid out and hashed before the first round.
pub(super) struct RoundPublisher {
    staging: Staging,
    specs: Vec<TensorSpec>,
    payload: Payload,
    hold: Hold,
}

/// The bytes of all tensors in their layout.
#[derive(Clone)]
struct Payload {
    /// The bytes of each tensor.
    tensors: Vec<Bytes>,
    source: Arc<dyn Source>,
    hashes: Vec<ChunkHash>,
}

impl RoundPublisher {
    /// Generates and hashes the payload that `args` describe.
    ///
    /// # Errors
    /// When memory is exhausted, or its size is no multiple of the element size.
    pub(super) fn new(staging: Staging, args: &PayloadArgs) -> Result<Self> {
        let bytes = args.serve.bytes;
        let load = Load { form: Form::Equal { bytes, count: args.tensors }, content: args.data }.open()?;
        let specs = load.specs().to_vec();
        let mut filled = None;
        Borrowed::from_hashed_source(&staging, specs.clone(), vec![], |manifest| {
            let payload = fill(manifest, &load)?;
            filled = Some(payload.clone());
            Ok::<_, io::Error>((payload.source, payload.hashes))
        })?;
        let payload = filled.expect("the closure above has filled it");
        Ok(Self { staging, specs, payload, hold: args.hold })
    }

    /// Publishes the payload for `round`, in a topic of its own: in a common topic, a version published early would be sent
    /// at once to the receiver that has just finished the round before. This costs microseconds, because nothing is copied or hashed. Codec choices
    /// and encodings cached for earlier rounds are not reused, since they belong to other versions.
    ///
    /// # Errors
    /// When the topic of the round already has a publisher.
    pub(super) async fn publish(&self, server: &Server, round: u32) -> Result<(Publisher, Publication)> {
        let version = self.version()?;
        // Each topic has one version only, so none is needed as a base.
        let options = TopicOptions { bases: 0, ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic(round)?, None, options)?;
        let publication = publisher.publish(version, vec![]).await?;
        Ok((publisher, publication))
    }

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

/// The topic of `round`.
///
/// # Errors
/// Never: the name is valid.
pub(super) fn topic(round: u32) -> Result<Topic> {
    Ok(Topic::new(&format!("bulk/{round}"))?)
}

/// Generates the payload in the layout of `manifest`, and hashes its chunks.
fn fill(manifest: &Manifest, load: &OpenLoad) -> io::Result<Payload> {
    let to_usize = |range: std::ops::Range<u64>| range.start as usize..range.end as usize;
    let region = HostMemory::new(u64::MAX).allocate(manifest.payload_bytes() as usize);
    let mut region = region.map_err(io::Error::other)?;
    region.fill(0);
    for (index, tensor) in manifest.tensors().iter().enumerate() {
        load.fill(0, index, &mut region[to_usize(tensor.range().expect("it is in one piece"))])?;
    }
    let bytes = region.freeze();
    let chunks = manifest.chunking().iter();
    let hashes = chunks.map(|(_, range)| ChunkHash::of(&bytes[to_usize(range)])).collect();
    let tensors = manifest
        .tensors()
        .iter()
        .map(|tensor| bytes.slice(to_usize(tensor.range().expect("it is in one piece"))))
        .collect();
    Ok(Payload { tensors, source: Arc::new(HostSource::new(bytes)), hashes })
}
