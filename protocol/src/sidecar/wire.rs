//! Sidecar messages as protobuf. `sidecar.proto` defines the same messages for other languages; the test `proto_file`
//! compares the two field by field.

use crate::message::wire::Entry;
use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromProducer {
    #[prost(oneof = "ProducerKind", tags = "1, 2, 3, 4, 5, 6")]
    pub(crate) kind: Option<ProducerKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ProducerKind {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    Manifest(ManifestPart),
    #[prost(message, tag = "3")]
    Lend(Lend),
    #[prost(message, tag = "4")]
    Publish(Publish),
    #[prost(message, tag = "5")]
    Withdraw(Withdraw),
    #[prost(message, tag = "6")]
    End(End),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ToProducer {
    #[prost(oneof = "ServerKind", tags = "1, 2, 3, 4, 5, 6")]
    pub(crate) kind: Option<ServerKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ServerKind {
    #[prost(message, tag = "1")]
    Welcome(Welcome),
    #[prost(message, tag = "2")]
    Published(Published),
    #[prost(message, tag = "3")]
    Refused(Refused),
    #[prost(message, tag = "4")]
    Progress(Progress),
    #[prost(message, tag = "5")]
    Ended(Ended),
    #[prost(message, tag = "6")]
    Close(Close),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Hello {
    #[prost(uint32, tag = "1")]
    pub(crate) revision_min: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) revision_max: u32,
    #[prost(string, tag = "3")]
    pub(crate) agent: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ManifestPart {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) part: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Lend {
    #[prost(uint64, tag = "1")]
    pub(crate) start: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) bytes: u64,
    #[prost(oneof = "Memory", tags = "3, 4, 5")]
    pub(crate) memory: Option<Memory>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Memory {
    #[prost(message, tag = "3")]
    Memfd(Memfd),
    #[prost(message, tag = "4")]
    CudaIpc(CudaIpc),
    #[prost(message, tag = "5")]
    CudaFd(CudaFd),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Memfd {
    #[prost(uint64, tag = "1")]
    pub(crate) offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CudaIpc {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) device: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) handle: Vec<u8>,
    #[prost(uint64, tag = "3")]
    pub(crate) offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CudaFd {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) device: Vec<u8>,
    #[prost(uint64, tag = "2")]
    pub(crate) buffer_bytes: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Publish {
    #[prost(uint64, tag = "1")]
    pub(crate) publication: u64,
    #[prost(string, tag = "2")]
    pub(crate) topic: String,
    #[prost(message, repeated, tag = "3")]
    pub(crate) metadata: Vec<Entry>,
    #[prost(string, tag = "4")]
    pub(crate) reason: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Withdraw {
    #[prost(uint64, tag = "1")]
    pub(crate) publication: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct End {
    #[prost(uint64, tag = "1")]
    pub(crate) request: u64,
    #[prost(string, tag = "2")]
    pub(crate) topic: String,
    #[prost(bool, tag = "3")]
    pub(crate) withdraw: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Welcome {
    #[prost(uint32, tag = "1")]
    pub(crate) revision: u32,
    #[prost(string, tag = "2")]
    pub(crate) agent: String,
    #[prost(uint32, tag = "3")]
    pub(crate) chunk_bytes: u32,
    #[prost(uint32, repeated, tag = "4")]
    pub(crate) memories: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Published {
    #[prost(uint64, tag = "1")]
    pub(crate) publication: u64,
    #[prost(fixed64, tag = "2")]
    pub(crate) epoch: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) version: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Refused {
    #[prost(uint64, tag = "1")]
    pub(crate) publication: u64,
    #[prost(uint32, tag = "2")]
    pub(crate) reason: u32,
    #[prost(string, tag = "3")]
    pub(crate) text: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Progress {
    #[prost(uint64, tag = "1")]
    pub(crate) publication: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) committed: u64,
    #[prost(bool, tag = "3")]
    pub(crate) is_over: bool,
    #[prost(bool, tag = "4")]
    pub(crate) is_released: bool,
    #[prost(uint64, tag = "5")]
    pub(crate) loaded: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Ended {
    #[prost(uint64, tag = "1")]
    pub(crate) request: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Close {
    #[prost(string, tag = "1")]
    pub(crate) text: String,
}
