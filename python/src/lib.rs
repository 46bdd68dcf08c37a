//! The native module of the Python package `tensor_relay`: servers, clients and their tensors.
//!
//! The package's Python files: `tensor_relay/__init__.py` has the entry points `serve`, `connect` and `publish_to`,
//! `errors.py` the exception classes, `_frameworks.py` the code for each framework, `_client.py` the methods of `Client`
//! that wait more than once, `_native.pyi` the signatures of this module. Users read `python/README.md`.

#![deny(unsafe_code)]

mod admin;
mod awaitable;
mod boxes;
mod buckets;
mod client;
mod closable;
mod command;
mod connect;
mod description;
mod engine_caches;
mod errors;
mod exit;
mod gpu;
mod guards;
mod hold;
mod interpreter;
mod logging;
mod memory;
mod metadata;
mod out;
mod producer;
mod publication;
mod range;
mod relay;
mod runtime;
mod select;
mod serve;
mod snapshot;
mod split;
mod start;
mod subscription;
mod tensor;
mod tensors_in;
mod tickets;
mod topic_info;
mod topic_publisher;
mod until_closed;
mod version;
mod wait;

use pyo3::prelude::*;

/// The allocator of all Rust code here, the same as the command line's. Encoded chunks are allocated and freed all the
/// time, and the system's allocator would return their memory to the kernel each time. Python's memory and its tensors'
/// are not affected.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The native part of `tensor_relay`. Private: import from `tensor_relay`.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use super::{
        boxes::{Boxes, boxes_of},
        buckets::{Bucket, buckets, is_bucket_of},
        client::{Client, check_stream},
        command::run_command,
        connect::connect,
        description::{Description, TensorInfo},
        engine_caches::unpack_engine_caches,
        exit::{finish, prepare_exit},
        producer::{Producer, publish_to},
        publication::Publication,
        relay::Relay,
        serve::serve,
        snapshot::{CodecCount, Receipt, Snapshot},
        subscription::{Progress, Subscription},
        tensor::Tensor,
        tickets::server_of,
        topic_info::TopicInfo,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn add_constants(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("RESERVED_PREFIX", tensor_relay_server::RESERVED_PREFIX)
    }
}
