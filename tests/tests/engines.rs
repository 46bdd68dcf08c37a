//! Every copy engine passes the same cases; the host engine is the reference.

use std::sync::Arc;
use tensor_relay_device::{HostEngine, HostMemory};

fn host_engine() -> Arc<HostEngine> {
    Arc::new(HostEngine::new(HostMemory::new(64 << 20)).expect("a thread can be started"))
}

tensor_relay_device::engine_cases!(host, host_engine);
