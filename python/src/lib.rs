//! The native module of the Python package `tensor_relay`: servers, clients and their tensors.
//!
//! What Python sees is written in Python where that says it better: `tensor_relay/__init__.py` has the two ways in,
//! `errors.py` the tree of errors, `_frameworks.py` what is peculiar to each framework, `_native.pyi` the signatures of
//! what is here. Its documentation is `python/README.md`.

#![deny(unsafe_code)]

mod admin;
mod awaitable;
mod buckets;
mod client;
mod closable;
mod command;
mod description;
mod entries;
mod errors;
mod gpu;
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
mod start;
mod subscription;
mod tensor;
mod tensors_in;
mod tickets;
mod topic_info;
mod topic_options;
mod version;
mod wait;

use pyo3::prelude::*;

/// What the command line allocates with, for what is allocated in Rust: encoded chunks come and go, and the system's would
/// give their memory back, and ask for it again, each time. Python's own memory, and its tensors', are not touched.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What `tensor_relay` is made of. Private: import from `tensor_relay`.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use super::{
        buckets::{buckets, is_part},
        client::{Client, connect, server_of},
        command::run_command,
        description::{Description, TensorInfo},
        interpreter::{begin_finish, finish},
        producer::{Producer, publish_to},
        publication::Publication,
        relay::Relay,
        serve::serve,
        snapshot::{CodecCount, Receipt, Snapshot},
        subscription::{Progress, Subscription},
        tensor::Tensor,
        topic_info::TopicInfo,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn facts(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
