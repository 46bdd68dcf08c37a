//! Every dtype, from GPU over loopback to GPU and back to the host, compared byte for byte.

use super::Job;
use crate::{
    gpu::{
        engine::Engine,
        line,
        loopback::{Loopback, Setup},
        payload::{self, OnDevice, noise_of},
    },
    size,
};
use anyhow::Result;
use tensor_relay_client::Snapshot;
use tensor_relay_device::Capacity;
use tensor_relay_protocol::{Dtype, Manifest, Shape, TensorName, TensorSpec};

pub(super) const ABOUT: &str = "\
Tensors of every dtype, empty or of lengths that are no multiple of a page, are sent from allocations of their own on \
the GPU over loopback to the GPU, copied to the host, and compared with the uploaded bytes; in small chunks and in \
large ones.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    for chunk_bytes in job.choose(&[64 << 10, 1 << 20, 16 << 20], &[64 << 10]) {
        compare(&job, &engine, chunk_bytes).await?;
    }
    Ok(())
}

async fn compare(job: &Job, engine: &Engine, chunk_bytes: u64) -> Result<()> {
    let specs = specs_of_every_dtype(if job.quick { 10_000 } else { 5_000_000 })?;
    let manifest = payload::manifest(specs.clone(), chunk_bytes)?;
    let capacity = Capacity { slots: 4, slot_bytes: chunk_bytes as usize };
    let [sending, landing] = [engine.device(capacity)?, engine.device(capacity)?];
    let from = OnDevice::scattered(&sending, &manifest)?;
    let bytes = noise_of(manifest.payload_bytes(), chunk_bytes)?;
    from.upload(&bytes).await?;
    let setup = Setup::new(chunk_bytes, 4, Some(landing));
    let service = Loopback::start(&setup, 1).await?;
    service.serving.publish(specs, from.source()?).await?;
    let landed = service.readers[0].next().await?;
    let outcome = landed.is_on_device().then(|| "it did".to_owned());
    let name = format!("the snapshot lands on the device, in chunks of {}", size::text(chunk_bytes));
    line::check(name, outcome.ok_or_else(|| "it landed in host memory".into()));
    let snapshot = landed.to_host().await?;
    check_bytes(&manifest, &bytes, &snapshot, chunk_bytes);
    Ok(())
}

/// Tensors of each dtype: without elements, with few and with many, mostly of lengths that need padding.
fn specs_of_every_dtype(elements: u64) -> Result<Vec<TensorSpec>> {
    let mut specs = Vec::new();
    for dtype in Dtype::ALL {
        // Multiples of eight, because elements smaller than a byte must fill bytes completely.
        for (index, elements) in [0, 8, 1_000 * 8 + 8, elements / 8 * 8].into_iter().enumerate() {
            let name = TensorName::new(&format!("{}.{index}", dtype.name()))?;
            specs.push(TensorSpec::new(name, *dtype, Shape::new(&[elements])?));
        }
    }
    Ok(specs)
}

fn check_bytes(manifest: &Manifest, bytes: &[u8], snapshot: &Snapshot, chunk_bytes: u64) {
    for dtype in Dtype::ALL {
        let mut compared_bytes = 0;
        let mut differs = None;
        for tensor in manifest.tensors().iter().filter(|tensor| tensor.dtype == *dtype) {
            let range = tensor.range().expect("it is in one piece");
            let expected = &bytes[range.start as usize..range.end as usize];
            compared_bytes += expected.len();
            if snapshot.tensor(tensor.name.as_str()).as_deref() != Some(expected) {
                differs.get_or_insert_with(|| format!("{} is not what was uploaded", tensor.name));
            }
        }
        let outcome = match differs {
            Some(differs) => Err(differs),
            None => Ok(format!("{compared_bytes} bytes are equal")),
        };
        line::check(format!("{} in chunks of {}", dtype.name(), size::text(chunk_bytes)), outcome);
    }
}
