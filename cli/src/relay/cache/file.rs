//! The file of one version: a head with everything about it and the hash of that, and its bytes.

use super::{CacheError, Kept, OriginId};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
    sync::Arc,
};
use tensor_relay_client::{Epoch, Manifest, RelayId, RelayPath, Snapshot, Topic, Version, VersionId};
use tensor_relay_device::{HostMemory, HostSource};
use tensor_relay_server::{ChunkHash, Limits, RestoredVersion, VersionDigest};

/// The beginning of a file: the format, and its revision.
const MAGIC: [u8; 8] = *b"trcache2";

/// The most bytes of what is described as text: a topic, the metadata of an announcement and relays.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// The bytes of a chunk's hash.
const HASH_BYTES: usize = 16;

/// What is described as text.
#[derive(Debug, Serialize, Deserialize)]
struct Description {
    topic: String,
    epoch: u64,
    version: u64,
    metadata: Vec<(String, String)>,
    relays: Vec<[u8; 16]>,
    origin: [u8; 16],
    manifest_bytes: u64,
    chunks: u32,
}

/// Everything about a version but its bytes, as it is written.
pub(super) struct Head {
    bytes: Vec<u8>,
    payload_bytes: u64,
}

impl Head {
    /// Hashes the chunks of a version with this payload.
    pub(super) fn of(snapshot: &Snapshot, payload: &[u8], origin: OriginId) -> Self {
        let (id, manifest) = (snapshot.id(), snapshot.manifest());
        let hashes = manifest.chunking().iter().flat_map(|(_, range)| {
            let chunk = payload.get(range.start as usize..range.end as usize);
            ChunkHash::of(chunk.unwrap_or_default()).0
        });
        let description = Description {
            topic: id.topic.to_string(),
            epoch: id.epoch.0,
            version: id.version.0,
            metadata: snapshot.metadata().to_vec(),
            relays: snapshot.relays().relays().iter().map(|relay| relay.0).collect(),
            origin: origin.0,
            manifest_bytes: manifest.encoded().len() as u64,
            chunks: manifest.chunking().count(),
        };
        let text = serde_json::to_vec(&description).expect("text and numbers can be written as JSON");
        let mut described = (text.len() as u64).to_le_bytes().to_vec();
        described.extend(text);
        described.extend_from_slice(manifest.encoded());
        described.extend(hashes);
        let hash = ChunkHash::of(&described).0;
        Self { bytes: [&MAGIC[..], &hash, &described].concat(), payload_bytes: payload.len() as u64 }
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.bytes.len() as u64 + self.payload_bytes
    }

    pub(super) fn write(&self, file: &mut File, payload: &[u8]) -> io::Result<()> {
        file.write_all(&self.bytes)?;
        file.write_all(payload)
    }
}

/// A version that was read.
pub(super) struct Content {
    description: Description,
    topic: Topic,
    manifest: Arc<Manifest>,
    hashes: Vec<ChunkHash>,
    source: HostSource,
}

impl Content {
    /// Reads a version into `memory`, and compares its bytes with their hashes. Blocks.
    pub(super) fn read(path: &Path, memory: &HostMemory) -> Result<Self, CacheError> {
        let damaged = |what: &str| CacheError::Damaged { path: path.into(), what: what.into() };
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::UnexpectedEof => damaged("it is too short"),
            _ => CacheError::Read { path: path.into(), source },
        };
        let file = File::open(path).map_err(failed)?;
        let mut rest = file.metadata().map_err(failed)?.len();
        let mut take = |len: u64| {
            rest = rest.checked_sub(len).ok_or_else(|| damaged("it is too short"))?;
            let mut bytes = vec![0; len as usize]; // No more than the file has.
            (&file).read_exact(&mut bytes).map_err(failed)?;
            Ok::<_, CacheError>(bytes)
        };
        if take(MAGIC.len() as u64)? != MAGIC {
            return Err(damaged("it is of another format"));
        }
        let hash = take(HASH_BYTES as u64)?;
        let text_bytes = take(8)?;
        let len = u64::from_le_bytes(text_bytes[..].try_into().unwrap_or_default());
        if len > TEXT_BYTES_MAX {
            return Err(damaged("its description is too long"));
        }
        let text = take(len)?;
        let description: Description =
            serde_json::from_slice(&text).map_err(|error| damaged(&format!("its description: {error}")))?;
        let encoded = take(description.manifest_bytes)?;
        let hashes = take(u64::from(description.chunks) * HASH_BYTES as u64)?;
        if ChunkHash::of(&[&text_bytes[..], &text, &encoded, &hashes].concat()).0[..] != hash[..] {
            return Err(damaged("its description has another hash"));
        }
        let topic = Topic::new(&description.topic).map_err(|error| damaged(&error.to_string()))?;
        let manifest = Manifest::decode(encoded.into(), &Limits::default());
        let manifest = manifest.map_err(|error| damaged(&format!("its manifest: {error}")))?;
        if rest != manifest.payload_bytes() || description.chunks != manifest.chunking().count() {
            return Err(damaged("its length is not that of its manifest"));
        }
        let allocated = memory.allocate(rest as usize);
        let mut region =
            allocated.map_err(|error| CacheError::Memory { path: path.into(), what: error.to_string() })?;
        (&file).read_exact(&mut region).map_err(failed)?;
        let hashes: Vec<ChunkHash> = hashes.as_chunks().0.iter().copied().map(ChunkHash).collect();
        for ((chunk, range), hash) in manifest.chunking().iter().zip(&hashes) {
            if ChunkHash::of(&region[range.start as usize..range.end as usize]) != *hash {
                return Err(damaged(&format!("chunk {chunk} has another hash")));
            }
        }
        let (manifest, source) = (Arc::new(manifest), HostSource::of_region(region));
        Ok(Self { description, topic, manifest, hashes, source })
    }

    /// The version, as it is named to its origin, and as it is offered.
    pub(super) fn into_parts(self) -> (VersionId, Kept, RestoredVersion) {
        let Self { description, topic, manifest, hashes, source } = self;
        let (epoch, version) = (Epoch(description.epoch), Version(description.version));
        let digest = VersionDigest::of(manifest.digest(), hashes.iter().copied());
        let relays = description.relays.into_iter().map(RelayId).collect::<Vec<_>>();
        let relays = RelayPath::try_from(relays).unwrap_or_default();
        let metadata = description.metadata;
        (
            VersionId { topic, epoch, version },
            Kept { epoch, version, digest, origin: OriginId(description.origin) },
            RestoredVersion { manifest, source, hashes, metadata, relays },
        )
    }
}
