//! Encodings that were received, and are sent on in place of own ones.

use super::{Encoded, Encoder};
use crate::egress::{Payload, encodings::EncodingKey};
use bytes::Bytes;
use std::time::Duration;
use tensor_relay_protocol::{ChunkHeader, CodecId};

impl Encoder {
    /// Copies the encoding of a chunk that was received; `None` if it is raw, and so in the version's memory, or if there is
    /// no room: then a receiver is sent another one.
    pub fn keep(&self, header: &ChunkHeader, encoded: &[u8]) -> Option<Bytes> {
        (header.codec != CodecId::Raw).then(|| self.cache.copy(encoded).ok()).flatten()
    }

    /// Sends a chunk of `payload` on as it was received, to whoever can decode that: `encoding` is what was
    /// [kept](Self::keep) of it, and `base` the version that it was encoded against, if it is here. It takes the place of an
    /// own encoding, which is made for others, or once it is evicted.
    pub fn handle_received(
        &self,
        payload: &Payload,
        header: &ChunkHeader,
        encoding: Option<Bytes>,
        base: Option<&Payload>,
    ) {
        let ChunkHeader { chunk, codec, hash, .. } = *header;
        if header.base.is_none() {
            payload.handle_received(chunk, codec);
        }
        let Some(bytes) = encoding.filter(|_| header.base.is_some() == base.is_some()) else { return };
        payload.register_encodings(&self.cache);
        let key = EncodingKey { payload: payload.key(), chunk, codec, base: base.map(Payload::key) };
        self.cache
            .insert(key, Some(Encoded { codec, hash, bytes, worker_time: Duration::ZERO }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Workers, egress::CodecRequest};
    use std::sync::Arc;
    use tensor_relay_device::HostSource;
    use tensor_relay_protocol::{
        ChunkHash, ChunkIndex, Dtype, Epoch, Limits, Manifest, Shape, SubscriptionId, TensorName, TensorSpec,
        Version, codec,
    };

    /// Goal: what was received is sent as it came, without an encoding; who cannot decode it is sent another one.
    #[tokio::test]
    async fn a_received_encoding_takes_the_place_of_an_own_one() {
        let raw = vec![7; 4096];
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, Shape::new(&[4096]).unwrap());
        let manifest = Manifest::layout(vec![spec], vec![], 4096, &Limits::default()).unwrap();
        let payload = Payload::new(Arc::new(manifest), Arc::new(HostSource::new(raw.clone().into())));
        let mut encoded = vec![0; 4096];
        let context = tensor_relay_protocol::Context { dtype: Dtype::U8, base: None };
        let len = codec(CodecId::Zstd).encode(context, &raw, &mut encoded).unwrap();
        let header = ChunkHeader {
            subscription: SubscriptionId(1),
            epoch: Epoch(1),
            version: Version(1),
            chunk: ChunkIndex(0),
            codec: CodecId::Zstd,
            raw_bytes: 4096,
            encoded_bytes: len as u32,
            hash: ChunkHash::of(&raw),
            base: None,
        };
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        let kept = encoder.keep(&header, &encoded[..len]);
        let received = kept.clone().unwrap();
        encoder.handle_received(&payload, &header, kept, None);
        assert_eq!(payload.received(ChunkIndex(0)), Some(CodecId::Zstd));
        let fixed = CodecRequest::Fixed(CodecId::Zstd);
        let sent = encoder.encode(&payload, ChunkIndex(0), fixed).await.unwrap();
        assert_eq!((sent.codec, sent.bytes.as_ptr()), (CodecId::Zstd, received.as_ptr()), "without a copy");
        assert_eq!(encoder.stats().encoded, 0);
        let other = encoder.encode(&payload, ChunkIndex(0), CodecId::Raw).await.unwrap();
        assert_eq!((other.codec, other.bytes.len()), (CodecId::Raw, 4096));
        assert!(
            encoder.keep(&ChunkHeader { codec: CodecId::Raw, ..header }, &raw).is_none(),
            "it is in place"
        );
    }
}
