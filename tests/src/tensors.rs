//! Test snapshots whose content follows from tensor names and the version.
//!
//! The content of a tensor is a function of its name and version, so a receiver can check a snapshot without other
//! data. A mixture of two versions is detected, except in tensors of [`steady`], most of which is the same in both.

use rand::{Rng, RngExt};
use std::{
    collections::HashMap,
    convert::Infallible,
    pin::pin,
    task::{Context, Poll, Waker},
};
use tensor_relay_client::Snapshot;
use tensor_relay_device::{Device, DeviceBuffer};
use tensor_relay_protocol::{Dtype, Shape, Tensor, TensorName, TensorSpec};
use tensor_relay_server::{Server, Staged};

/// The prefix of names of tensors whose content compresses well.
const SMOOTH: &str = "smooth.";

/// The prefix of names of tensors of which about one word in [`PERIOD_VERSIONS`] changes with each version.
const STEADY: &str = "steady.";

/// The number of versions after which every word of a steady tensor has changed.
const PERIOD_VERSIONS: u64 = 128;

/// The prefix of names of tensors whose content resembles weights.
const WEIGHTS: &str = "weights.";

/// A `u8` tensor of `bytes` incompressible bytes.
pub fn noise(name: &str, bytes: u64) -> TensorSpec {
    spec(name, Dtype::U8, bytes)
}

/// A `u8` tensor of `bytes` bytes that compress well.
pub fn smooth(name: &str, bytes: u64) -> TensorSpec {
    spec(&format!("{SMOOTH}{name}"), Dtype::U8, bytes)
}

/// A `u8` tensor of `bytes` incompressible bytes, of which few change between consecutive versions.
pub fn steady(name: &str, bytes: u64) -> TensorSpec {
    spec(&format!("{STEADY}{name}"), Dtype::U8, bytes)
}

/// A tensor of `elements` bf16 numbers with few distinct exponents, as weights have.
pub fn weights(name: &str, elements: u64) -> TensorSpec {
    spec(&format!("{WEIGHTS}{name}"), Dtype::Bf16, elements)
}

/// A one-dimensional tensor.
pub fn spec(name: &str, dtype: Dtype, elements: u64) -> TensorSpec {
    let shape = Shape::new(&[elements]).unwrap();
    TensorSpec::new(TensorName::new(name).unwrap(), dtype, shape)
}

/// A tensor of these dimensions.
pub fn shaped(name: &str, dtype: Dtype, dimensions: &[u64]) -> TensorSpec {
    TensorSpec::new(TensorName::new(name).unwrap(), dtype, Shape::new(dimensions).unwrap())
}

/// About `bytes` bytes of tensors: a few large ones, many small ones of odd sizes, some empty, of several dtypes.
pub fn random(rng: &mut impl Rng, bytes: u64) -> Vec<TensorSpec> {
    const DTYPES: [Dtype; 5] = [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F4E2M1, Dtype::F8E4M3Fn];
    let mut specs = Vec::new();
    let mut remaining = bytes;
    while remaining > 0 {
        let size = match rng.random_range(0..10) {
            0 => 0,
            1..=6 => rng.random_range(1..2_000),
            7..=8 => rng.random_range(2_000..80_000),
            _ => rng.random_range(80_000..600_000),
        };
        let dtype = DTYPES[rng.random_range(0..DTYPES.len())];
        let elements = size * 8 / u64::from(dtype.bits());
        let prefix = if rng.random_bool(0.5) { SMOOTH } else { "noise." };
        specs.push(spec(&format!("{prefix}{}", specs.len()), dtype, elements));
        remaining = remaining.saturating_sub(size.max(1));
    }
    specs
}

/// Stages `specs` with the content of `version` for `server`.
pub fn stage(server: &Server, specs: Vec<TensorSpec>, version: u64) -> Staged {
    let names: Vec<TensorName> = specs.iter().map(|spec| spec.name.clone()).collect();
    let fill = |index: usize, out: &mut [u8]| {
        write_content(names[index].as_str(), version, out);
        Ok::<(), Infallible>(())
    };
    Staged::new(&server.staging(), specs, vec![], fill).unwrap()
}

/// Puts `specs` with the content of `version` on `device`. Aliases have no bytes of their own.
pub async fn on_device(
    device: &Device,
    specs: Vec<TensorSpec>,
    version: u64,
) -> Vec<(TensorSpec, DeviceBuffer)> {
    let mut tensors = Vec::new();
    for spec in specs {
        let bytes = if spec.alias_of.is_some() { 0 } else { spec.shape.byte_len(spec.dtype).unwrap() };
        let buffer = device.allocate(bytes as usize).unwrap();
        if bytes > 0 {
            let sink = buffer.sink();
            let mut target = sink.open(0..bytes).await.unwrap();
            write_content(spec.name.as_str(), version, &mut target);
            sink.write(target).await.unwrap();
        }
        tensors.push((spec, buffer));
    }
    tensors
}

/// The metadata that is published with every version and checked with its tensors.
pub fn metadata(version: u64) -> Vec<(String, String)> {
    vec![("version".into(), version.to_string())]
}

/// Checks the metadata, and every byte of the tensors in `snapshot`, against the content of its version. Missing
/// tensors are not noticed.
///
/// # Panics
/// If the metadata or a byte of a tensor differs from the published version.
pub fn check(snapshot: &Snapshot) {
    check_content(snapshot, snapshot.id().version.0);
}

/// As [`check`], for a snapshot with the content of `version`, whatever its own version number is.
///
/// # Panics
/// If the metadata or a byte of a tensor differs from the published version.
pub fn check_content(snapshot: &Snapshot, version: u64) {
    assert_eq!(difference(snapshot, version), None);
}

/// The first difference that [`check`] would find between `snapshot` and the content of `version`; `None` if there is
/// none.
pub fn difference(snapshot: &Snapshot, version: u64) -> Option<String> {
    let snapshot = on_host(snapshot);
    if snapshot.metadata() != metadata(version) {
        return Some(format!("the metadata of version {version} is {:?}", snapshot.metadata()));
    }
    let place = |tensor: &Tensor| (tensor.offset(), tensor.byte_len());
    let mut owners = HashMap::new();
    for tensor in snapshot.manifest().tensors() {
        // Aliases come after the tensor whose bytes they share.
        owners.entry(place(tensor)).or_insert(tensor.name.as_str());
    }
    snapshot.tensors().find_map(|(tensor, bytes)| {
        let whole = snapshot.manifest().tensor(tensor.name.as_str()).unwrap();
        let name = owners[&place(whole)];
        let is_same = bytes.len() as u64 == tensor.byte_len()
            && match &tensor.shard {
                Some(shard) if tensor.shape != whole.shape => {
                    let mut content = vec![0; whole.byte_len() as usize];
                    write_content(name, version, &mut content);
                    bytes == sliced(&content, whole, &shard.start, tensor.shape.dimensions())
                }
                _ => has_content(name, version, &bytes),
            };
        (!is_same).then(|| format!("{name} is not as published in version {version}"))
    })
}

/// The box of a tensor's bytes that begins at `start` and has these lengths, element by element.
fn sliced(content: &[u8], tensor: &Tensor, start: &[u64], lengths: &[u64]) -> Vec<u8> {
    let element_bytes = tensor.dtype.bits() as usize / 8;
    let mut indexes = vec![0];
    for ((start, length), dimension) in start.iter().zip(lengths).zip(tensor.shape.dimensions()) {
        let extend = |outer: u64| (*start..start + length).map(move |index| outer * dimension + index);
        indexes = indexes.into_iter().flat_map(extend).collect();
    }
    let element = |index: u64| &content[index as usize * element_bytes..][..element_bytes];
    indexes.into_iter().flat_map(element).copied().collect()
}

/// A copy of the snapshot in host memory. Its device must copy synchronously, as those of [`pair`](crate::pair) do.
///
/// # Panics
/// If the copy fails, or is not synchronous.
pub fn on_host(snapshot: &Snapshot) -> Snapshot {
    const POLLS_MAX: usize = 100_000;
    // Unconstrained: polling in a loop, without returning to the runtime, would use up tokio's cooperative budget.
    let mut copying = pin!(tokio::task::unconstrained(snapshot.to_host()));
    let mut context = Context::from_waker(Waker::noop());
    let copied = (0..POLLS_MAX).find_map(|_| match copying.as_mut().poll(&mut context) {
        Poll::Ready(copied) => Some(copied),
        Poll::Pending => None,
    });
    copied.expect("the device copies synchronously").unwrap()
}

/// Writes the content of the tensor `name` in `version`.
pub fn write_content(name: &str, version: u64, out: &mut [u8]) {
    let is_steady = name.starts_with(STEADY);
    let seed = if is_steady { 0 } else { version };
    let key = name.bytes().fold(seed, |key, byte| scramble(key ^ u64::from(byte)));
    if is_steady {
        write_words(out, |index| steady_word(key.wrapping_add(index), version));
    } else if name.starts_with(SMOOTH) {
        const RUN_WORDS: u64 = 64;
        write_words(out, |index| scramble(key.wrapping_add(index / RUN_WORDS)));
    } else if name.starts_with(WEIGHTS) {
        write_words(out, |index| four_weights(scramble(key.wrapping_add(index))));
    } else {
        // Most tensors are noise. BLAKE3 is optimised in debug builds; this module is not.
        blake3::Hasher::new().update(&key.to_le_bytes()).finalize_xof().fill(out);
    }
}

fn has_content(name: &str, version: u64, bytes: &[u8]) -> bool {
    let mut expected = vec![0; bytes.len()];
    write_content(name, version, &mut expected);
    bytes == expected
}

fn write_words(out: &mut [u8], word: impl Fn(u64) -> u64) {
    for (index, bytes) in (0..).zip(out.chunks_mut(8)) {
        bytes.copy_from_slice(&word(index).to_le_bytes()[..bytes.len()]);
    }
}

/// A word that changes once in [`PERIOD_VERSIONS`] versions; in which of them depends on `key`.
fn steady_word(key: u64, version: u64) -> u64 {
    let changes = (version + scramble(key) % PERIOD_VERSIONS) / PERIOD_VERSIONS;
    scramble(key ^ changes.rotate_right(8))
}

/// Four bf16 numbers: random signs and mantissas, and one of eight exponents, most often the largest.
fn four_weights(noise: u64) -> u64 {
    const SIGNS_AND_MANTISSAS: u64 = 0x807f_807f_807f_807f;
    const LARGEST: u64 = 0x3e00_3e00_3e00_3e00;
    const SMALLER: u64 = 0x0380_0380_0380_0380;
    (noise & SIGNS_AND_MANTISSAS) | (LARGEST - (noise & (noise >> 5) & SMALLER))
}

/// The finalizer of SplitMix64: each bit of the input changes about half of the output's bits.
fn scramble(input: u64) -> u64 {
    let x = input.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_words_of_a_steady_tensor_change() {
        let mut versions = [vec![0; 80_000], vec![0; 80_000]];
        for (version, bytes) in (7..).zip(&mut versions) {
            write_content("steady.a", version, bytes);
        }
        let changed = versions[0].chunks(8).zip(versions[1].chunks(8)).filter(|(a, b)| a != b);
        assert!((40..160).contains(&changed.count()), "one in 128 of 10,000");
        assert!(has_content("steady.a", 8, &versions[1]) && !has_content("steady.a", 8, &versions[0]));
    }

    /// A checker that accepts anything would let every scenario pass.
    #[test]
    fn wrong_bytes_and_mixed_versions_are_detected() {
        for name in ["noise.a", "smooth.a", "weights.a"] {
            let (mut one, mut two) = (vec![0; 1_003], vec![0; 1_003]);
            write_content(name, 1, &mut one);
            write_content(name, 2, &mut two);
            assert!(has_content(name, 1, &one) && !has_content(name, 2, &one));
            let torn = [&one[..1_000], &two[1_000..]].concat();
            assert!(!has_content(name, 1, &torn) && !has_content(name, 2, &torn));
            for index in [0, 500, 1_002] {
                let mut wrong = one.clone();
                wrong[index] ^= 1;
                assert!(!has_content(name, 1, &wrong));
            }
        }
    }
}
