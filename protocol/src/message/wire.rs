//! Control messages as protobuf. `tensor_relay.proto` defines the same messages for other languages; the test
//! `proto_file` compares the two field by field.

use crate::protobuf::{messages, oneof};
use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromClient {
    #[prost(
        oneof = "ClientKind",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21"
    )]
    pub(crate) kind: Option<ClientKind>,
}

oneof! {
    #[expect(clippy::large_enum_variant, reason = "one exists at a time, briefly")]
    ClientKind {
        1 Hello(Hello),
        2 Subscribe(Subscribe),
        3 Credit(Credit),
        4 Committed(Committed),
        5 Abort(Abort),
        6 Unsubscribe(Unsubscribe),
        7 List(List),
        8 Join(Join),
        9 Acknowledge(Acknowledge),
        10 Watch(Watch),
        11 Unwatch(Unwatch),
        12 Request(Request),
        13 Retire(Retire),
        14 Probe(Probe),
        15 Loaded(Loaded),
        16 Share(Share),
        17 Held(Held),
        19 Check(Check),
        20 Decline(Decline),
        21 BadPeer(BadPeer),
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromServer {
    #[prost(oneof = "ServerKind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17")]
    pub(crate) kind: Option<ServerKind>,
}

oneof! {
    ServerKind {
        1 Welcome(Welcome),
        2 Announce(Announce),
        3 Complete(Complete),
        4 Abort(Abort),
        5 End(End),
        6 Topics(Topics),
        7 Drain(Drain),
        8 Found(Found),
        9 Joined(Joined),
        10 Retired(Retire),
        11 Sources(Sources),
        12 Hashes(Hashes),
        13 Waiting(Waiting),
        14 Held(Held),
        15 Revoke(Revoke),
        16 Checked(Checked),
        17 Encodings(Encodings),
    }
}

messages! {
    Hello {
        1 [uint32] revision_min: u32,
        2 [uint32] revision_max: u32,
        3 [string] agent: String,
        4 [uint32, repeated] codecs: Vec<u32>,
        5 [string, optional] token: Option<String>,
        6 [uint32, repeated] features: Vec<u32>,
    }

    Welcome {
        1 [uint32] revision: u32,
        2 [string] agent: String,
        3 [fixed64] session: u64,
        4 [uint32] subscriptions_max: u32,
        5 [bytes = "vec", optional] lane_grant: Option<Vec<u8>>,
        6 [uint32] lanes_max: u32,
        7 [bytes = "vec"] instance: Vec<u8>,
        8 [message, repeated] lane_addresses: Vec<LaneAddress>,
        9 [uint32, repeated] features: Vec<u32>,
    }

    LaneAddress {
        1 [uint32] transport: u32,
        2 [string] address: String,
    }

    Subscribe {
        1 [uint32] subscription: u32,
        2 [string] topic: String,
        3 [uint32] mode: u32,
        4 [uint32] credit: u32,
        5 [message, optional] have: Option<Have>,
        6 [string, repeated] selection: Vec<String>,
        7 [message, optional] start: Option<Start>,
        8 [uint32] window: u32,
        9 [string, optional] reader: Option<String>,
        10 [bool] preempt: bool,
        11 [message, optional] partial: Option<Partial>,
        12 [bytes = "vec", optional] manifest: Option<Vec<u8>>,
        13 [message, optional] base: Option<Have>,
        14 [uint32, optional] codec: Option<u32>,
        15 [bool] once: bool,
        16 [bool] describe: bool,
        17 [uint32] order: u32,
        18 [string, repeated] layers: Vec<String>,
        19 [bytes = "vec", optional] consumer: Option<Vec<u8>>,
        20 [message, repeated] within: Vec<ChunkRange>,
        21 [message, repeated] boxes: Vec<TensorBox>,
        22 [bool] memory: bool,
        23 [bytes = "vec", optional] grant: Option<Vec<u8>>,
        24 [message, optional] gpu: Option<WantedGpu>,
    }

    WantedGpu {
        1 [bytes = "vec"] device: Vec<u8>,
        2 [bool] in_place: bool,
    }

    TensorBox {
        1 [string] tensors: String,
        2 [message, repeated] slices: Vec<Slice>,
    }

    Slice {
        1 [uint32] dimension: u32,
        2 [uint64] start: u64,
        3 [uint64] length: u64,
        4 [uint32] part: u32,
        5 [uint32] parts: u32,
    }

    Have {
        1 [fixed64] epoch: u64,
        2 [uint64] version: u64,
        3 [bytes = "vec"] digest: Vec<u8>,
    }

    Start {
        1 [uint32] kind: u32,
        2 [fixed64, optional] epoch: Option<u64>,
        3 [uint64] version: u64,
    }

    Partial {
        1 [fixed64] epoch: u64,
        2 [uint64] version: u64,
        3 [message, repeated] chunks: Vec<ChunkRange>,
        4 [bytes = "vec"] digest: Vec<u8>,
    }

    ChunkRange {
        1 [uint32] start: u32,
        2 [uint32] end: u32,
    }

    Credit {
        1 [uint32] subscription: u32,
        2 [uint32] chunks: u32,
    }

    Committed {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [bool] kept: bool,
    }

    Abort {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [uint32] reason: u32,
    }

    Unsubscribe {
        1 [uint32] subscription: u32,
        2 [bool] keep_place: bool,
    }

    List {}

    Join {
        1 [fixed64] session: u64,
        2 [bytes = "vec"] lane_grant: Vec<u8>,
        3 [uint32] lane: u32,
        4 [bytes = "vec"] instance: Vec<u8>,
    }

    Joined {}

    Retire {
        1 [uint32] lane: u32,
    }

    Request {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [message, repeated] chunks: Vec<ChunkRange>,
        5 [bool] hashes: bool,
        6 [bool] again: bool,
    }

    Acknowledge {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
    }

    Watch {
        1 [uint32] watch: u32,
        2 [string] glob: String,
    }

    Unwatch {
        1 [uint32] watch: u32,
    }

    Probe {
        1 [uint32] probe: u32,
        2 [uint32] lane: u32,
        3 [uint32] bytes: u32,
    }

    Loaded {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [bytes = "vec"] digest: Vec<u8>,
    }

    Announce {
        1 [uint32] subscription: u32,
        2 [string] topic: String,
        3 [fixed64] epoch: u64,
        4 [uint64] version: u64,
        5 [bytes = "vec"] manifest_digest: Vec<u8>,
        6 [uint64] skipped: u64,
        7 [message, repeated] metadata: Vec<Entry>,
        8 [bool] may_be_base: bool,
        9 [bool] afresh: bool,
        11 [message, optional] lost_place: Option<Place>,
        12 [bool] shared: bool,
        13 [message, optional] lending: Option<Lending>,
        14 [bytes = "vec", repeated] relays: Vec<Vec<u8>>,
    }

    Lending {
        1 [message, optional] memory: Option<Lent>,
        2 [uint32] chunks: u32,
        3 [message, optional] gpu: Option<LentOnGpu>,
    }

    Lent {
        1 [uint64] inode: u64,
        2 [uint64] offset_bytes: u64,
        3 [bytes = "vec"] digest: Vec<u8>,
        4 [uint32, optional] why_not_gpu: Option<u32>,
    }

    LentOnGpu {
        1 [uint64] inode: u64,
        2 [bytes = "vec"] gpu: Vec<u8>,
        3 [uint64] buffer_bytes: u64,
        4 [bytes = "vec", optional] handle: Option<Vec<u8>>,
        5 [bytes = "vec"] digest: Vec<u8>,
        6 [bool] in_place: bool,
    }

    Decline {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
    }

    Place {
        1 [fixed64] epoch: u64,
        2 [uint64] version: u64,
    }

    Complete {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [bytes = "vec"] digest: Vec<u8>,
    }

    Waiting {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
    }

    End {
        1 [uint32] subscription: u32,
        2 [uint32] reason: u32,
    }

    Topics {
        1 [message, repeated] topics: Vec<TopicEntry>,
        2 [bool] more: bool,
    }

    Found {
        1 [uint32] watch: u32,
        2 [string, repeated] topics: Vec<String>,
    }

    TopicEntry {
        1 [string] topic: String,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [uint64] tensors: u64,
        5 [uint64] payload_bytes: u64,
        6 [uint64] subscribers: u64,
        7 [bytes = "vec", repeated] relays: Vec<Vec<u8>>,
    }

    Drain {
        1 [string, repeated] alternatives: Vec<String>,
    }

    Sources {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [message, repeated] sources: Vec<Source>,
        5 [bool] is_seeded: bool,
    }

    Encodings {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [bytes = "vec"] entries: Vec<u8>,
    }

    Source {
        1 [message, repeated] addresses: Vec<LaneAddress>,
        2 [bytes = "vec"] key: Vec<u8>,
        3 [bytes = "vec"] grant: Vec<u8>,
        4 [message, repeated] chunks: Vec<ChunkRange>,
        5 [bool] is_near: bool,
    }

    Share {
        1 [message, repeated] addresses: Vec<LaneAddress>,
        2 [bytes = "vec", optional] key: Option<Vec<u8>>,
        3 [string] site: String,
    }

    Held {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [message, repeated] added: Vec<ChunkRange>,
        5 [message, repeated] withdrawn: Vec<ChunkRange>,
    }

    Revoke {
        1 [uint32] subscription: u32,
        2 [bytes = "vec"] taker: Vec<u8>,
        3 [bool] restored: bool,
    }

    BadPeer {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [bytes = "vec"] key: Vec<u8>,
    }

    Check {
        1 [fixed64] session: u64,
        2 [bytes = "vec"] nonce: Vec<u8>,
    }

    Checked {
        1 [bytes = "vec"] proof: Vec<u8>,
    }

    Hashes {
        1 [uint32] subscription: u32,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
        4 [uint32] first: u32,
        5 [bytes = "vec"] hashes: Vec<u8>,
    }

    Entry {
        1 [string] key: String,
        2 [string] value: String,
    }
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
