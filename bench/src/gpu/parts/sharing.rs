//! Device memory shared with another process, which needs a real driver to be tested.

use super::{Job, Part, rate};
use crate::{
    gpu::{
        engine::Engine,
        line::{Cells, Line},
        payload::{OnDevice, noise_of},
    },
    size,
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    os::fd::{AsFd, OwnedFd},
    process::Stdio,
    str::FromStr,
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
use tokio::{process::Command, time::timeout};

pub(super) const ABOUT: &str = "\
One tensor on the GPU is shared with another process, as a training process shares its tensors with a sidecar: in place, by \
a CUDA IPC handle, and as a copy in a buffer that is exported as a file descriptor. The other process compares every byte. \
Virtual memory, such as PyTorch's expandable segments, must have no IPC handle: it is shared as a copy. The rate is \
that of the copy within the GPU. A process in namespaces of its own stands for another container: its results are notes, \
and no failures.";

pub(super) async fn run(job: Job) -> Result<()> {
    match (&job.shared, job.engine()?) {
        (_, Engine::Host(_)) => {
            job.printer().note("The host engine shares no memory with other processes.");
            Ok(())
        }
        (Some(shared), Engine::Cuda(engine)) => import(&job, &engine, shared).await,
        (None, Engine::Cuda(engine)) => export(&job, &engine).await,
    }
}

async fn export(job: &Job, engine: &Arc<CudaEngine>) -> Result<()> {
    let printer = job.printer();
    let device = Engine::Cuda(Arc::clone(engine)).device(CAPACITY)?;
    let tensor = OnDevice::whole(&device, job.bytes)?;
    tensor.upload(&noise_of(job.bytes, 0)?).await?;
    let memory = tensor.buffers().find_map(|buffer| buffer.memory::<CudaMemory>());
    let memory = memory.context("the tensor is on this engine's device")?;

    let handle = ipc_handle(engine, &memory);
    let outcome = handle.as_ref().map(|handle| format!("at {} of its allocation", handle.offset));
    printer.check("a plain allocation has a handle", outcome.map_err(ToString::to_string));
    if let Ok(handle) = handle {
        check_import(job, "in place", &Shared::Ipc(handle), None).await?;
        let this = Engine::Cuda(Arc::clone(engine)).device(CAPACITY)?;
        let imported = this.import(Exported::Ipc(handle), &[]);
        let outcome = imported
            .err()
            .map(|error| error.to_string())
            .ok_or_else(|| "it opens".to_owned());
        printer.check("a handle opens nothing in its own process", outcome);
    }
    let buffer = match engine.shared_buffer(job.bytes) {
        Ok(buffer) => buffer,
        Err(error) => {
            printer.check("there is memory that can be shared as a descriptor", Err(error.to_string()));
            return Ok(());
        }
    };
    for _ in 0..FILLS {
        let begun = Instant::now();
        buffer.fill(vec![(Arc::clone(&memory), 0)])?;
        let setting = Cells::of([("bytes", size::text(job.bytes))]);
        let measured = Cells::of([("gb_per_s", rate(job.bytes, begun.elapsed().as_secs_f64()))]);
        printer.sample("copies within the device", setting, measured);
    }
    let refused = ipc_handle(engine, buffer.memory()).err().map(|error| error.to_string());
    printer.check("virtual memory has no handle", refused.ok_or_else(|| "it has one".to_owned()));
    let FdMemory { device, fd, len } = buffer.export()?;
    check_import(job, "as a copy", &Shared::Fd { device, len }, Some(fd)).await
}

/// The number of measured copies: several, because the first copy also creates the stream.
const FILLS: usize = 5;

fn ipc_handle(engine: &CudaEngine, memory: &Arc<CudaMemory>) -> Result<IpcMemory, ShareError> {
    engine.export_in_place(std::slice::from_ref(memory))?.remove(0)
}

/// Checks that another process can import the memory, and notes whether a process in namespaces of its own can.
async fn check_import(job: &Job, how: &str, shared: &Shared, fd: Option<OwnedFd>) -> Result<()> {
    let outcome = run_importer(job, &[], shared, &fd).await?;
    job.printer().check(format!("another process reads it {how}"), outcome);
    for (namespaces, options) in NAMESPACES {
        let unshare: Vec<&str> = ["unshare"].iter().chain(options).chain(UNSHARE_OPTIONS).copied().collect();
        let outcome = run_importer(job, &unshare, shared, &fd).await?;
        let result = outcome.unwrap_or_else(|reason| format!("it cannot: {reason}"));
        job.printer()
            .note(format!("A process in {namespaces} namespaces of its own reads it {how}: {result}"));
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
    let this = std::env::current_exe().context("cannot find this program to start it again")?;
    let mut words = prefix.iter().map(Into::into).chain([this.into_os_string()]);
    let mut command = Command::new(words.next().context("there is at least this program")?);
    let stdin = match fd {
        Some(fd) => Stdio::from(fd.try_clone()?),
        None => Stdio::null(),
    };
    command
        .args(words)
        .args(["gpu-part", Part::Sharing.name(), "--budget-ms=0"])
        .arg(format!("--device={}", job.device))
        .arg(format!("--bytes={}", job.bytes))
        .arg(format!("--shared={shared}"))
        .stdin(stdin)
        .kill_on_drop(true);
    let output = match timeout(OTHER_PROCESS_TIMEOUT, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Ok(Err(format!("it cannot be started: {error}"))),
        Err(_) => return Ok(Err(format!("it had not ended after {OTHER_PROCESS_TIMEOUT:?} and was killed"))),
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    let mut checks = stdout.lines().filter_map(|line| match serde_json::from_str(line) {
        Ok(Line::Check(check)) => Some(if check.passed { Ok(check.detail) } else { Err(check.detail) }),
        _ => None,
    });
    let stderr = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " / ");
    Ok(checks.next().unwrap_or_else(|| Err(format!("{}: {stderr}", output.status))))
}

/// The deadline of the other process. Creating a context takes a second, and comparing the bytes another.
const OTHER_PROCESS_TIMEOUT: Duration = Duration::from_secs(15);

/// Imports and compares the shared memory: what the other process does.
async fn import(job: &Job, engine: &Arc<CudaEngine>, shared: &Shared) -> Result<()> {
    let exported = match *shared {
        Shared::Ipc(memory) => Exported::Ipc(memory),
        Shared::Fd { device, len } => {
            Exported::Fd(FdMemory { device, fd: std::io::stdin().as_fd().try_clone_to_owned()?, len })
        }
    };
    let outcome = compare(job, engine, exported).await;
    job.printer()
        .check("the bytes are equal", outcome.map_err(|error| format!("{error:#}")));
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

/// The description of shared memory on the command line of the other process, without its file descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu) enum Shared {
    Ipc(IpcMemory),
    Fd { device: DeviceUuid, len: u64 },
}

impl std::fmt::Display for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        match self {
            Self::Ipc(IpcMemory { device, handle, offset, len }) => {
                write!(f, "ipc:{}:{}:{offset}:{len}", hex(&device.bytes()), hex(handle))
            }
            Self::Fd { device, len } => write!(f, "fd:{}:{len}", hex(&device.bytes())),
        }
    }
}

impl FromStr for Shared {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        fn bytes<const N: usize>(hex: &str) -> Result<[u8; N]> {
            ensure!(hex.len() == 2 * N && hex.is_ascii(), "{hex:?} is not {N} bytes");
            let mut bytes = [0; N];
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16)?;
            }
            Ok(bytes)
        }
        let words: Vec<&str> = text.split(':').collect();
        Ok(match words[..] {
            ["ipc", device, handle, offset, len] => Self::Ipc(IpcMemory {
                device: DeviceUuid::new(bytes(device)?),
                handle: bytes(handle)?,
                offset: offset.parse()?,
                len: len.parse()?,
            }),
            ["fd", device, len] => Self::Fd { device: DeviceUuid::new(bytes(device)?), len: len.parse()? },
            _ => bail!("{text:?} is no shared memory"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_formatted_and_parsed() {
        let device = DeviceUuid::new([9; 16]);
        let ipc = Shared::Ipc(IpcMemory { device, handle: [0xAB; 64], offset: 512, len: 7 });
        for shared in [ipc, Shared::Fd { device, len: 1 << 40 }] {
            assert_eq!(shared.to_string().parse::<Shared>().unwrap(), shared);
        }
        assert!("fd:00:1".parse::<Shared>().is_err() && "".parse::<Shared>().is_err());
    }
}
