//! Control messages as protobuf. `tensor_relay.proto` defines the same messages for other languages; the test
//! `proto_file` compares the two field by field.

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromClient {
    #[prost(
        oneof = "ClientKind",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19"
    )]
    pub(crate) kind: Option<ClientKind>,
}

#[derive(Clone, PartialEq, Oneof)]
#[expect(clippy::large_enum_variant, reason = "one exists at a time, briefly")]
pub(crate) enum ClientKind {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    Subscribe(Subscribe),
    #[prost(message, tag = "3")]
    Credit(Credit),
    #[prost(message, tag = "4")]
    Committed(Committed),
    #[prost(message, tag = "5")]
    Abort(Abort),
    #[prost(message, tag = "6")]
    Unsubscribe(Unsubscribe),
    #[prost(message, tag = "7")]
    List(List),
    #[prost(message, tag = "8")]
    Join(Join),
    #[prost(message, tag = "9")]
    Acknowledge(Acknowledge),
    #[prost(message, tag = "10")]
    Watch(Watch),
    #[prost(message, tag = "11")]
    Unwatch(Unwatch),
    #[prost(message, tag = "12")]
    Request(Request),
    #[prost(message, tag = "13")]
    Retire(Retire),
    #[prost(message, tag = "14")]
    Probe(Probe),
    #[prost(message, tag = "15")]
    Loaded(Loaded),
    #[prost(message, tag = "16")]
    Share(Share),
    #[prost(message, tag = "17")]
    Held(Held),
    #[prost(message, tag = "18")]
    Take(Take),
    #[prost(message, tag = "19")]
    Check(Check),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromServer {
    #[prost(oneof = "ServerKind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16")]
    pub(crate) kind: Option<ServerKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ServerKind {
    #[prost(message, tag = "1")]
    Welcome(Welcome),
    #[prost(message, tag = "2")]
    Announce(Announce),
    #[prost(message, tag = "3")]
    Complete(Complete),
    #[prost(message, tag = "4")]
    Abort(Abort),
    #[prost(message, tag = "5")]
    End(End),
    #[prost(message, tag = "6")]
    Topics(Topics),
    #[prost(message, tag = "7")]
    Drain(Drain),
    #[prost(message, tag = "8")]
    Found(Found),
    #[prost(message, tag = "9")]
    Joined(Joined),
    #[prost(message, tag = "10")]
    Retired(Retire),
    #[prost(message, tag = "11")]
    Sources(Sources),
    #[prost(message, tag = "12")]
    Hashes(Hashes),
    #[prost(message, tag = "13")]
    Waiting(Waiting),
    #[prost(message, tag = "14")]
    Held(Held),
    #[prost(message, tag = "15")]
    Revoke(Revoke),
    #[prost(message, tag = "16")]
    Checked(Checked),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Hello {
    #[prost(uint32, tag = "1")]
    pub(crate) revision_min: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) revision_max: u32,
    #[prost(string, tag = "3")]
    pub(crate) agent: String,
    #[prost(uint32, repeated, tag = "4")]
    pub(crate) codecs: Vec<u32>,
    #[prost(string, optional, tag = "5")]
    pub(crate) token: Option<String>,
    #[prost(uint32, repeated, tag = "6")]
    pub(crate) features: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Welcome {
    #[prost(uint32, tag = "1")]
    pub(crate) revision: u32,
    #[prost(string, tag = "2")]
    pub(crate) agent: String,
    #[prost(fixed64, tag = "3")]
    pub(crate) session: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) subscriptions_max: u32,
    #[prost(bytes = "vec", optional, tag = "5")]
    pub(crate) lane_grant: Option<Vec<u8>>,
    #[prost(uint32, tag = "6")]
    pub(crate) lanes_max: u32,
    #[prost(bytes = "vec", tag = "7")]
    pub(crate) instance: Vec<u8>,
    #[prost(message, repeated, tag = "8")]
    pub(crate) lane_addresses: Vec<LaneAddress>,
    #[prost(uint32, repeated, tag = "9")]
    pub(crate) features: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LaneAddress {
    #[prost(uint32, tag = "1")]
    pub(crate) transport: u32,
    #[prost(string, tag = "2")]
    pub(crate) address: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Subscribe {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(string, tag = "2")]
    pub(crate) topic: String,
    #[prost(uint32, tag = "3")]
    pub(crate) mode: u32,
    #[prost(uint32, tag = "4")]
    pub(crate) credit: u32,
    #[prost(message, optional, tag = "5")]
    pub(crate) have: Option<Have>,
    #[prost(string, repeated, tag = "6")]
    pub(crate) selection: Vec<String>,
    #[prost(message, optional, tag = "7")]
    pub(crate) start: Option<Start>,
    #[prost(uint32, tag = "8")]
    pub(crate) window: u32,
    #[prost(string, optional, tag = "9")]
    pub(crate) reader: Option<String>,
    #[prost(bool, tag = "10")]
    pub(crate) preempt: bool,
    #[prost(message, optional, tag = "11")]
    pub(crate) partial: Option<Partial>,
    #[prost(bytes = "vec", optional, tag = "12")]
    pub(crate) manifest: Option<Vec<u8>>,
    #[prost(message, optional, tag = "13")]
    pub(crate) base: Option<Have>,
    #[prost(uint32, optional, tag = "14")]
    pub(crate) codec: Option<u32>,
    #[prost(bool, tag = "15")]
    pub(crate) once: bool,
    #[prost(bool, tag = "16")]
    pub(crate) describe: bool,
    #[prost(uint32, tag = "17")]
    pub(crate) order: u32,
    #[prost(string, repeated, tag = "18")]
    pub(crate) layers: Vec<String>,
    #[prost(bytes = "vec", optional, tag = "19")]
    pub(crate) consumer: Option<Vec<u8>>,
    #[prost(message, repeated, tag = "20")]
    pub(crate) within: Vec<ChunkRange>,
    #[prost(message, repeated, tag = "21")]
    pub(crate) boxes: Vec<TensorBox>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TensorBox {
    #[prost(string, tag = "1")]
    pub(crate) tensors: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) slices: Vec<Slice>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Slice {
    #[prost(uint32, tag = "1")]
    pub(crate) dimension: u32,
    #[prost(uint64, tag = "2")]
    pub(crate) start: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) length: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) part: u32,
    #[prost(uint32, tag = "5")]
    pub(crate) parts: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Have {
    #[prost(fixed64, tag = "1")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) version: u64,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) digest: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Start {
    #[prost(uint32, tag = "1")]
    pub(crate) kind: u32,
    #[prost(fixed64, optional, tag = "2")]
    pub(crate) epoch: Option<u64>,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Partial {
    #[prost(fixed64, tag = "1")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) version: u64,
    #[prost(message, repeated, tag = "3")]
    pub(crate) chunks: Vec<ChunkRange>,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) digest: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ChunkRange {
    #[prost(uint32, tag = "1")]
    pub(crate) start: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) end: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Credit {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) chunks: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Committed {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(bool, tag = "4")]
    pub(crate) kept: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Abort {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) reason: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Unsubscribe {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(bool, tag = "2")]
    pub(crate) keep_place: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct List {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Join {
    #[prost(fixed64, tag = "1")]
    pub(crate) session: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) lane_grant: Vec<u8>,
    #[prost(uint32, tag = "3")]
    pub(crate) lane: u32,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) instance: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Joined {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Retire {
    #[prost(uint32, tag = "1")]
    pub(crate) lane: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Request {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(message, repeated, tag = "4")]
    pub(crate) chunks: Vec<ChunkRange>,
    #[prost(bool, tag = "5")]
    pub(crate) hashes: bool,
    #[prost(bool, tag = "6")]
    pub(crate) again: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Acknowledge {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Watch {
    #[prost(uint32, tag = "1")]
    pub(crate) watch: u32,
    #[prost(string, tag = "2")]
    pub(crate) glob: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Unwatch {
    #[prost(uint32, tag = "1")]
    pub(crate) watch: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Probe {
    #[prost(uint32, tag = "1")]
    pub(crate) probe: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) lane: u32,
    #[prost(uint32, tag = "3")]
    pub(crate) bytes: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Loaded {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) digest: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Announce {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(string, tag = "2")]
    pub(crate) topic: String,
    #[prost(fixed64, tag = "3")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) version: u64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) manifest_digest: Vec<u8>,
    #[prost(uint64, tag = "6")]
    pub(crate) skipped: u64,
    #[prost(message, repeated, tag = "7")]
    pub(crate) metadata: Vec<Entry>,
    #[prost(bool, tag = "8")]
    pub(crate) may_be_base: bool,
    #[prost(bool, tag = "9")]
    pub(crate) afresh: bool,
    #[prost(message, optional, tag = "11")]
    pub(crate) lost_place: Option<Place>,
    #[prost(bool, tag = "12")]
    pub(crate) shared: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Place {
    #[prost(fixed64, tag = "1")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) version: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Complete {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) digest: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Waiting {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct End {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) reason: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Topics {
    #[prost(message, repeated, tag = "1")]
    pub(crate) topics: Vec<TopicEntry>,
    #[prost(bool, tag = "2")]
    pub(crate) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Found {
    #[prost(uint32, tag = "1")]
    pub(crate) watch: u32,
    #[prost(string, repeated, tag = "2")]
    pub(crate) topics: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TopicEntry {
    #[prost(string, tag = "1")]
    pub(crate) topic: String,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) tensors: u64,
    #[prost(uint64, tag = "5")]
    pub(crate) payload_bytes: u64,
    #[prost(uint64, tag = "6")]
    pub(crate) subscribers: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Drain {
    #[prost(string, repeated, tag = "1")]
    pub(crate) alternatives: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Sources {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(message, repeated, tag = "4")]
    pub(crate) sources: Vec<Source>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Source {
    #[prost(message, repeated, tag = "1")]
    pub(crate) addresses: Vec<LaneAddress>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) grant: Vec<u8>,
    #[prost(message, repeated, tag = "4")]
    pub(crate) chunks: Vec<ChunkRange>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Share {
    #[prost(message, repeated, tag = "1")]
    pub(crate) addresses: Vec<LaneAddress>,
    #[prost(bytes = "vec", optional, tag = "2")]
    pub(crate) key: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Held {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(message, repeated, tag = "4")]
    pub(crate) added: Vec<ChunkRange>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) withdrawn: Vec<ChunkRange>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Take {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(string, tag = "2")]
    pub(crate) topic: String,
    #[prost(fixed64, tag = "3")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) version: u64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) grant: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Revoke {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(bytes = "vec", optional, tag = "4")]
    pub(crate) taker: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Check {
    #[prost(fixed64, tag = "1")]
    pub(crate) session: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) nonce: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Checked {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) proof: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Hashes {
    #[prost(uint32, tag = "1")]
    pub(crate) subscription: u32,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) first: u32,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) hashes: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Entry {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}

impl From<&(String, String)> for Entry {
    fn from((key, value): &(String, String)) -> Self {
        Self { key: key.clone(), value: value.clone() }
    }
}

impl From<Entry> for (String, String) {
    fn from(entry: Entry) -> Self {
        (entry.key, entry.value)
    }
}
