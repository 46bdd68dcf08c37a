//! Runs the same cases on every copy engine; the host engine is the reference. The CUDA engine runs on the fake driver.

use std::sync::Arc;
use tensor_relay_device::{
    HostEngine, HostMemory,
    cuda::{CudaEngine, CudaOptions},
};
use tensor_relay_tests::fake_cuda;

fn host_engine() -> Arc<HostEngine> {
    Arc::new(HostEngine::new(HostMemory::new(64 << 20)).expect("a thread can be started"))
}

fn cuda_engine() -> Arc<CudaEngine> {
    fake_cuda::load();
    CudaEngine::open(0, CudaOptions::default()).expect("the fake driver has a device")
}

tensor_relay_device::engine_cases!(host, host_engine);
tensor_relay_device::engine_cases!(cuda, cuda_engine);
