//! Hashes what is sent to members of a swarm, so that they may take it from each other.

use super::Encoder;
use crate::stages::Stage;
use bytes::Bytes;
use tensor_relay_protocol::{ChunkHeader, EncodingHash, EncodingHasher};

impl Encoder {
    /// The hash of an encoding as it is sent, with its `header`, computed on a worker. Costs about as much as hashing the
    /// encoded bytes once more.
    pub async fn vouch(&self, header: ChunkHeader, bytes: Bytes) -> EncodingHash {
        let _hashing = self.stages.begin(Stage::Encode);
        let hash = move || {
            let mut hasher = EncodingHasher::new(&header);
            hasher.update(&bytes);
            hasher.finish()
        };
        self.workers.run_over(header.encoded_bytes as usize, hash).await
    }
}
