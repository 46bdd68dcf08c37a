//! The codecs that `auto` chooses for the chunks of a file, at each level of effort.

use super::measure::Job;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    time::{Duration, Instant},
};
use tensor_relay_protocol::{Codec, CodecId, CodecSet, Effort, SMALL_BYTES, SizeEstimate, Sparse};

/// The choices for the chunks of one dtype, and the time that choosing takes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Choice {
    /// The time to estimate the encoded size of a chunk: the minimum over rounds, averaged over chunks; `None` if all
    /// chunks are too small to be estimated.
    #[serde(rename = "look_us")]
    pub(super) estimate_us: Option<f64>,
    pub(super) efforts: Vec<EffortChoice>,
}

/// The choices at one level of effort.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct EffortChoice {
    pub(super) effort: &'static str,
    /// The number of chunks for which each codec is chosen.
    pub(super) chunks: BTreeMap<&'static str, usize>,
}

impl Choice {
    /// Estimates each chunk, `rounds` times, and chooses a codec for it as a server does. (A server uses the estimate
    /// of a chunk for up to sixteen further chunks of its tensor.)
    pub(super) fn of(job: &Job<'_>, rounds: u32) -> Self {
        let estimates: Vec<ChunkEstimate> = (0..job.chunk_count())
            .map(|chunk| ChunkEstimate::of(job, chunk, rounds))
            .collect();
        let times: Vec<Duration> = estimates.iter().filter_map(|timed| timed.duration).collect();
        let mean = times.iter().sum::<Duration>().as_secs_f64() * 1e6 / times.len().max(1) as f64;
        let choice_at = |(name, effort)| {
            let mut chunks = BTreeMap::new();
            for ChunkEstimate { estimate, is_delta, .. } in &estimates {
                let codec = match is_delta {
                    true => CodecId::Sparse,
                    false => estimate.choose(CodecSet::all(), effort),
                };
                *chunks.entry(codec.name()).or_default() += 1;
            }
            EffortChoice { effort: name, chunks }
        };
        let efforts = [("light", Effort::Light), ("full", Effort::Full)].map(choice_at).into();
        Self { estimate_us: (!times.is_empty()).then_some(mean), efforts }
    }
}

/// The estimate of one chunk.
struct ChunkEstimate {
    estimate: SizeEstimate,
    /// Whether the chunk is sent as a delta against its base, with the codec `Sparse`, so that the estimate is not
    /// used.
    is_delta: bool,
    /// The minimum over rounds; `None` for a small chunk, which is not estimated.
    duration: Option<Duration>,
}

impl ChunkEstimate {
    /// Estimates a chunk as a server does, which skips small ones.
    fn of(job: &Job<'_>, chunk: usize, rounds: u32) -> Self {
        let raw = job.chunk(chunk);
        if raw.len() < SMALL_BYTES {
            return Self { estimate: SizeEstimate::NO_GAIN, is_delta: false, duration: None };
        }
        let timed = || {
            let begin = Instant::now();
            let estimate = SizeEstimate::of(job.dtype, raw, || begin.elapsed());
            (estimate, begin.elapsed())
        };
        let (estimate, mut duration) = timed();
        for _ in 1..rounds {
            duration = duration.min(timed().1);
        }
        let delta = Sparse.encode(job.context(chunk), raw, &mut vec![0; raw.len() / 2]);
        Self { estimate, is_delta: delta.is_some(), duration: Some(duration) }
    }
}

impl Display for Choice {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "auto chooses")?;
        for (at, choice) in self.efforts.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma} with {} effort {choice}", choice.effort)?;
        }
        match self.estimate_us {
            Some(estimate_us) => write!(f, "; the estimate of a chunk takes {estimate_us:.0} µs."),
            None => write!(f, "; no chunk is long enough to be estimated."),
        }
    }
}

impl Display for EffortChoice {
    /// Formats the only codec, or each codec with its share of the chunks, the largest share first.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let all: usize = self.chunks.values().sum();
        let mut chunks: Vec<(&&str, &usize)> = self.chunks.iter().collect();
        chunks.sort_by_key(|(_, chunks)| usize::MAX - *chunks);
        let share = |(codec, chunks): &(&&str, &usize)| match **chunks == all {
            true => (**codec).to_owned(),
            false => format!("{codec} {:.0} %", **chunks as f64 * 100.0 / all as f64),
        };
        let shares: Vec<String> = chunks.iter().map(share).collect();
        f.write_str(if shares.is_empty() { CodecId::Raw.name() } else { "" })?;
        f.write_str(&shares.join(" + "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload;
    use tensor_relay_protocol::Dtype;

    #[test]
    fn several_codecs_are_shown_with_their_shares() {
        let mut weights = vec![0; 256 << 10];
        workload::fill_with_weights(Dtype::Bf16, 1, &mut weights);
        let mut noise = vec![0; weights.len()];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        let short = [0; 100];
        let job = Job::of(Dtype::Bf16, vec![&weights, &noise, &noise, &short]);
        let choice = Choice::of(&job, 2);
        assert!(choice.estimate_us.is_some_and(|estimate_us| estimate_us > 0.0));
        let [light, full] = &choice.efforts[..] else { panic!("there are two levels") };
        assert_eq!((light.effort, full.effort), ("light", "full"));
        assert_eq!(full.chunks["raw"], 3, "noise, and the small chunk");
        let text = choice.to_string();
        assert!(text.starts_with("auto chooses with light effort raw 75 % + "), "{text}");
        assert!(text.ends_with(" µs."), "{text}");
    }

    #[test]
    fn small_chunks_are_not_estimated() {
        let choice = Choice::of(&Job::of(Dtype::U8, vec![&[7; 100]]), 1);
        assert_eq!(choice.estimate_us, None);
        let text = choice.to_string();
        assert!(
            text.contains("with light effort raw,") && text.contains("no chunk is long enough"),
            "{text}"
        );
    }
}
