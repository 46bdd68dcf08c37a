//! Device memory shared with another process, also in namespaces of its own.

use super::{Job, Part, rate};
use crate::{
    gpu::{
        child,
        engine::Engine,
        line::{self, Cells, Line},
        payload::{OnDevice, noise_of},
    },
    size,
};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    os::fd::{AsFd, OwnedFd},
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_device::{
    Capacity,
    cuda::{
        CudaEngine, CudaMemory,
        share::{DeviceUuid, Exported, FdMemory, IpcMemory, ShareError},
    },
};
use tokio::time::timeout;

pub(super) const ABOUT: &str = "\
One tensor on the GPU is shared with another process, as a training process shares its tensors with a sidecar: in place, by \
a CUDA IPC handle, and as a copy in a buffer that is exported as a file descriptor. The other process compares every byte. \
Virtual memory, such as PyTorch's expandable segments, must have no IPC handle: it is shared as a copy. The rate is \
that of the copy within the GPU. A process in namespaces of its own stands for another container: its results are notes, \
and no failures.";

pub(super) async fn run(job: Job) -> Result<()> {
    match (&job.shared, job.engine()?) {
        (_, Engine::Host(_)) => {
            line::note("The host engine shares no memory with other processes.");
            Ok(())
        }
        (Some(shared), Engine::Cuda(engine)) => import(&job, &engine, shared).await,
        (None, Engine::Cuda(engine)) => export(&job, &engine).await,
    }
}

async fn export(job: &Job, engine: &Arc<CudaEngine>) -> Result<()> {
    let device = Engine::Cuda(Arc::clone(engine)).device(CAPACITY)?;
    let tensor = OnDevice::whole(&device, job.bytes)?;
    tensor.upload(&noise_of(job.bytes, 0)?).await?;
    let memory = tensor.buffers().find_map(|buffer| buffer.memory::<CudaMemory>());
    let memory = memory.context("the tensor is on this engine's device")?;

    let handle = ipc_handle(engine, &memory);
    let outcome = handle.as_ref().map(|handle| format!("at {} of its allocation", handle.offset));
    line::check("a plain allocation has a handle", outcome.map_err(ToString::to_string));
    if let Ok(handle) = handle {
        let IpcMemory { device, handle: bytes, offset, len } = handle;
        let shared = Shared { device: device.bytes(), handle: Some(bytes.into()), offset, len };
        check_import(job, "in place", &shared, None).await?;
        let this = Engine::Cuda(Arc::clone(engine)).device(CAPACITY)?;
        let imported = this.import(Exported::Ipc(handle), &[]);
        let outcome = imported.map_or_else(|error| Ok(error.to_string()), |_| Err("it opens".into()));
        line::check("a handle opens nothing in its own process", outcome);
    }
    let buffer = engine
        .shared_buffer(job.bytes)
        .context("no memory can be shared as a descriptor")?;
    for _ in 0..FILLS {
        let begun = Instant::now();
        buffer.fill(vec![(Arc::clone(&memory), 0)])?;
        let setting = Cells::of([("bytes", size::text(job.bytes))]);
        let measured = Cells::of([("gb_per_s", rate(job.bytes, begun.elapsed().as_secs_f64()))]);
        line::sample("copies within the device", setting, measured);
    }
    let refused = ipc_handle(engine, buffer.memory()).err().map(|error| error.to_string());
    line::check("virtual memory has no handle", refused.ok_or_else(|| "it has one".to_owned()));
    let FdMemory { device, fd, len } = buffer.export()?;
    let shared = Shared { device: device.bytes(), handle: None, offset: 0, len };
    check_import(job, "as a copy", &shared, Some(fd)).await
}

/// The number of measured copies: several, because the first copy also creates the stream.
const FILLS: usize = 5;

fn ipc_handle(engine: &CudaEngine, memory: &Arc<CudaMemory>) -> Result<IpcMemory, ShareError> {
    engine.export_in_place(std::slice::from_ref(memory))?.remove(0)
}

/// Checks that another process can import the memory, and notes whether a process in namespaces of its own can.
async fn check_import(job: &Job, how: &str, shared: &Shared, fd: Option<OwnedFd>) -> Result<()> {
    let outcome = run_importer(job, &[], shared, &fd).await?;
    line::check(format!("another process reads it {how}"), outcome);
    for (namespaces, options) in NAMESPACES {
        let unshare: Vec<&str> = ["unshare"].iter().chain(options).chain(UNSHARE_OPTIONS).copied().collect();
        let outcome = run_importer(job, &unshare, shared, &fd).await?;
        let result = outcome.unwrap_or_else(|reason| format!("it cannot: {reason}"));
        line::note(format!("A process in {namespaces} namespaces of its own reads it {how}: {result}"));
    }
    Ok(())
}

/// The namespaces of a process that stands for another container. Not all machines permit users to make them.
const NAMESPACES: [(&str, &[&str]); 2] = [
    ("PID, IPC and mount", &["--pid", "--ipc"]),
    ("user, PID, IPC, mount and network", &["--user", "--map-root-user", "--pid", "--ipc", "--net"]),
];

/// The driver needs the `/proc` of its own PID namespace: without it, `cuInit` fails.
const UNSHARE_OPTIONS: &[&str] = &["--mount-proc", "--fork", "--kill-child"];

/// Starts this program again, with `prefix` before its command line, to import the shared memory. A file descriptor is
/// passed as its standard input.
async fn run_importer(
    job: &Job,
    prefix: &[&str],
    shared: &Shared,
    fd: &Option<OwnedFd>,
) -> Result<Result<String, String>> {
    let stdin = match fd {
        Some(fd) => Stdio::from(fd.try_clone()?),
        None => Stdio::null(),
    };
    let importing = Job { shared: Some(shared.clone()), ..job.clone() };
    let command = child::part_command(prefix, &[], Part::Sharing, &importing)?;
    let output = child::run("the other process", command, stdin, OTHER_PROCESS_TIMEOUT).await;
    let check = output.lines.into_iter().find_map(|line| match line {
        Line::Check(check) => Some(if check.passed { Ok(check.detail) } else { Err(check.detail) }),
        _ => None,
    });
    Ok(check.unwrap_or_else(|| Err(output.failure.unwrap_or_else(|| "it printed nothing".into()))))
}

/// The deadline of the other process. Creating a context takes a second, and comparing the bytes another.
const OTHER_PROCESS_TIMEOUT: Duration = Duration::from_secs(15);

/// Imports and compares the shared memory: what the other process does.
async fn import(job: &Job, engine: &Arc<CudaEngine>, shared: &Shared) -> Result<()> {
    let outcome = compare(job, engine, shared.exported()?).await;
    line::check("the bytes are equal", outcome.map_err(|error| error.to_string()));
    Ok(())
}

async fn compare(job: &Job, engine: &Arc<CudaEngine>, exported: Exported) -> Result<String> {
    let device = Engine::Cuda(Arc::clone(engine)).device(CAPACITY)?;
    let begun = Instant::now();
    let (mut buffers, returned) = device.import(exported, std::slice::from_ref(&(0..job.bytes)))?;
    let opened_ms = begun.elapsed().as_millis();
    let buffer = buffers.pop().context("one range was imported")?;
    let (source, expected) = (buffer.source(), noise_of(job.bytes, 0)?);
    for (index, piece) in expected.chunks(CAPACITY.slot_bytes).enumerate() {
        let start = (index * CAPACITY.slot_bytes) as u64;
        let read = source.read(start..start + piece.len() as u64).await?;
        ensure!(read[..] == *piece, "the bytes from {start} on differ");
    }
    drop((source, buffer));
    timeout(RETURN_TIMEOUT, returned.wait())
        .await
        .context("the import was not closed in time")?;
    Ok(format!("{} bytes are equal; opened in {opened_ms} ms", job.bytes))
}

const CAPACITY: Capacity = Capacity { slots: 4, slot_bytes: 4 << 20 };
/// The deadline for an import to be closed.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// Shared memory, as the other process is told of it. Without a handle, it is a file descriptor on standard input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::gpu) struct Shared {
    device: [u8; 16],
    handle: Option<Vec<u8>>,
    offset: u64,
    len: u64,
}

impl Shared {
    fn exported(&self) -> Result<Exported> {
        let (device, len) = (DeviceUuid::new(self.device), self.len);
        Ok(match &self.handle {
            Some(handle) => {
                let handle = handle[..].try_into().context("a handle has another length")?;
                Exported::Ipc(IpcMemory { device, handle, offset: self.offset, len })
            }
            None => {
                Exported::Fd(FdMemory { device, fd: std::io::stdin().as_fd().try_clone_to_owned()?, len })
            }
        })
    }
}
