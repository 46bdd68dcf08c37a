//! Sidecar messages as protobuf. `sidecar.proto` defines the same messages for other languages; the test `proto_file`
//! compares the two field by field.

use crate::{
    message::wire::Entry,
    protobuf::{messages, oneof},
};
use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromProducer {
    #[prost(oneof = "ProducerKind", tags = "1, 2, 3, 4, 5, 6")]
    pub(crate) kind: Option<ProducerKind>,
}

oneof! {
    ProducerKind {
        1 Hello(Hello),
        2 Manifest(ManifestPart),
        3 Lend(Lend),
        4 Publish(Publish),
        5 Withdraw(Withdraw),
        6 End(End),
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ToProducer {
    #[prost(oneof = "ServerKind", tags = "1, 2, 3, 4, 5, 6")]
    pub(crate) kind: Option<ServerKind>,
}

oneof! {
    ServerKind {
        1 Welcome(Welcome),
        2 Published(Published),
        3 Refused(Refused),
        4 Progress(Progress),
        5 Ended(Ended),
        6 Close(Close),
    }
}

messages! {
    Hello {
        1 [uint32] revision_min: u32,
        2 [uint32] revision_max: u32,
        3 [string] agent: String,
    }

    ManifestPart {
        1 [bytes = "vec"] part: Vec<u8>,
    }
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

oneof! {
    Memory {
        3 Memfd(Memfd),
        4 CudaIpc(CudaIpc),
        5 CudaFd(CudaFd),
    }
}

messages! {
    Memfd {
        1 [uint64] offset: u64,
    }

    CudaIpc {
        1 [bytes = "vec"] device: Vec<u8>,
        2 [bytes = "vec"] handle: Vec<u8>,
        3 [uint64] offset: u64,
    }

    CudaFd {
        1 [bytes = "vec"] device: Vec<u8>,
        2 [uint64] buffer_bytes: u64,
        3 [uint64] offset: u64,
    }

    Publish {
        1 [uint64] publication: u64,
        2 [string] topic: String,
        3 [message, repeated] metadata: Vec<Entry>,
        4 [string] reason: String,
    }

    Withdraw {
        1 [uint64] publication: u64,
    }

    End {
        1 [uint64] request: u64,
        2 [string] topic: String,
        3 [bool] withdraw: bool,
    }

    Welcome {
        1 [uint32] revision: u32,
        2 [string] agent: String,
        3 [uint32] chunk_bytes: u32,
        4 [uint32, repeated] memories: Vec<u32>,
    }

    Published {
        1 [uint64] publication: u64,
        2 [fixed64] epoch: u64,
        3 [uint64] version: u64,
    }

    Refused {
        1 [uint64] publication: u64,
        2 [uint32] reason: u32,
        3 [string] text: String,
    }

    Progress {
        1 [uint64] publication: u64,
        2 [uint64] committed: u64,
        3 [bool] is_over: bool,
        4 [bool] is_released: bool,
        5 [uint64] loaded: u64,
    }

    Ended {
        1 [uint64] request: u64,
    }

    Close {
        1 [string] text: String,
    }
}
