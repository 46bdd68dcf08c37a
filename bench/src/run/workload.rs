//! The workloads, their options, and the plan of a run with these options.

use crate::node::{
    Model,
    load::{Content, Form, Load},
    order::{Pace, Work},
};
use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{convert::Infallible, path::PathBuf, str::FromStr};

/// A typical use of tensor-relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// One large tensor.
    Bulk,
    /// The tensors of a model.
    StateDict,
    /// Ten thousand tensors of 4 KiB in one version.
    ManySmall,
    /// A thousand versions of 64 KiB a second: the rate, the latency, and the number of missed versions.
    Versions,
    /// Versions of 4 KiB, each published when the version before is committed: the latency.
    Latency,
    /// One large tensor to one consumer, and to several: the rate of each and of all.
    FanOut,
    /// One large tensor to fast consumers, alone and beside a consumer that reads a tenth of the time.
    SlowReader,
}

/// The content of the tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentArg {
    /// Noise.
    Random,
    /// Values with the statistics of weights.
    Weights,
    /// The tensors of a safetensors file on the producer's machine.
    File(PathBuf),
}

/// The options of a workload.
#[derive(Debug, Clone, clap::Args)]
pub struct WorkloadArgs {
    /// The workload.
    #[arg(long, value_enum, default_value_t = Workload::Bulk)]
    pub workload: Workload,
    /// The size of a version, or of each tensor of `many-small`, e.g. 256MiB. Default: 1GiB; 4KiB for `many-small` and
    /// `latency`, 64KiB for `versions`.
    #[arg(long, value_parser = crate::size::parse)]
    pub size: Option<u64>,
    /// The content of the tensors: `random`, `weights`, or a safetensors FILE of the producer's machine. Default:
    /// `weights` for `state-dict`, else `random`.
    #[arg(long, value_name = "random|weights|FILE")]
    pub content: Option<ContentArg>,
    /// For `state-dict`: the tensor names and shapes of this model, instead of those of a generated transformer of
    /// --size.
    #[arg(long, value_enum)]
    pub model: Option<Model>,
    /// For --model: the factor by which the number of rows of each tensor is multiplied.
    #[arg(long, requires = "model")]
    pub scale: Option<f64>,
    /// The number of tensors of `many-small`, or of versions of `latency`. Default 10000.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub count: Option<u32>,
    /// For `versions`: the number published a second. Default 1000.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub per_second: Option<u32>,
    /// For `versions`: the duration of a round in seconds. Default 5.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: Option<u32>,
    /// For `versions`: subscribes in mode `every`, so that the producer waits and no version is missed.
    #[arg(long)]
    pub every: bool,
}

/// The plan of a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) work: Work,
    /// The number of versions of a counted round.
    pub(crate) versions: u64,
    /// Whether consumers subscribe in mode `every`.
    pub(crate) every: bool,
    /// The scenes, which alternate round by round.
    pub(crate) scenes: Vec<Scene>,
}

/// A named set of consumers that take part in a round. Consumers are numbered from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scene {
    pub(crate) name: String,
    /// The measured consumers, for whose commits the producer waits.
    pub(crate) readers: Vec<usize>,
    /// A consumer that reads slowly and is not measured.
    pub(crate) slow: Option<usize>,
}

const DEFAULT_BYTES: u64 = 1 << 30;
const SMALL_BYTES: u64 = 4 << 10;
const VERSION_BYTES: u64 = 64 << 10;
const DEFAULT_COUNT: u32 = 10_000;
const DEFAULT_PER_SECOND: u32 = 1_000;
const DEFAULT_SECONDS: u32 = 5;

/// The number of versions in a counted round for each version in a warm-up round.
const WARM_UP_DIVISOR: u64 = 10;

/// The maximum number of versions in a round.
const VERSIONS_MAX: u64 = 100_000_000;

impl Workload {
    /// The default number of consumers.
    pub(crate) fn default_consumers(self) -> usize {
        match self {
            Self::FanOut => 4,
            Self::SlowReader => 2,
            _ => 1,
        }
    }

    /// Its name on the command line and in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bulk => "bulk",
            Self::StateDict => "state-dict",
            Self::ManySmall => "many-small",
            Self::Versions => "versions",
            Self::Latency => "latency",
            Self::FanOut => "fan-out",
            Self::SlowReader => "slow-reader",
        }
    }

    /// Whether its tensors can be published from the producer's memory; otherwise each version is new and staged.
    pub(crate) fn can_borrow(self) -> bool {
        !matches!(self, Self::Versions | Self::Latency)
    }

    fn scenes(self, consumers: usize) -> Result<Vec<Scene>> {
        let scene = |name: &str, readers| Scene { name: name.into(), readers, slow: None };
        let all = || (0..consumers).collect();
        match self {
            Self::FanOut => {
                ensure!(consumers >= 2, "`fan-out` compares one consumer with several: it needs two or more");
                Ok(vec![scene("one consumer", vec![0]), scene(&format!("{consumers} consumers"), all())])
            }
            Self::SlowReader => {
                ensure!(consumers >= 2, "`slow-reader` needs two consumers or more: the last one is slow");
                let fast: Vec<usize> = (0..consumers - 1).collect();
                let beside = Scene { slow: Some(consumers - 1), ..scene("beside a slow one", fast.clone()) };
                Ok(vec![scene("without the slow one", fast), beside])
            }
            _ => Ok(vec![scene(self.name(), all())]),
        }
    }
}

impl WorkloadArgs {
    /// The plan for this number of consumers.
    ///
    /// # Errors
    /// When options contradict each other.
    pub(crate) fn plan(&self, consumers: usize) -> Result<Plan> {
        ensure!(consumers > 0, "at least one consumer is needed");
        self.check()?;
        let (work, versions) = match self.workload {
            Workload::Versions => {
                let versions =
                    u64::from(self.per_second()) * u64::from(self.seconds.unwrap_or(DEFAULT_SECONDS));
                (self.stream(VERSION_BYTES, Pace::PerSecond(self.per_second())), versions)
            }
            Workload::Latency => (self.stream(SMALL_BYTES, Pace::AfterCommit), self.count().into()),
            _ => (Work::Version(self.load()), 1),
        };
        ensure!(versions <= VERSIONS_MAX, "{versions} versions in a round are more than {VERSIONS_MAX}");
        Ok(Plan { work, versions, every: self.every, scenes: self.workload.scenes(consumers)? })
    }

    /// Refuses options without effect: a result must not suggest that they had one.
    fn check(&self) -> Result<()> {
        use Workload::{Bulk, FanOut, Latency, ManySmall, SlowReader, StateDict, Versions};
        let is = |workloads: &[Workload]| workloads.contains(&self.workload);
        let has_file = matches!(self.content, Some(ContentArg::File(_)));
        let name = self.workload.name();
        for (given, has_effect, option) in [
            (self.model.is_some(), is(&[StateDict]) && !has_file, "--model"),
            (self.size.is_some(), self.model.is_none() && !has_file, "--size"),
            (self.count.is_some(), is(&[ManySmall, Latency]), "--count"),
            (self.per_second.is_some(), is(&[Versions]), "--per-second"),
            (self.seconds.is_some(), is(&[Versions]), "--seconds"),
            (self.every, is(&[Versions]), "--every"),
            (has_file, is(&[Bulk, StateDict, FanOut, SlowReader]), "a file as --content"),
            (self.content == Some(ContentArg::Weights), !is(&[Versions, Latency]), "--content weights"),
        ] {
            if given && !has_effect {
                bail!("{option} has no effect for `{name}` with these other options");
            }
        }
        Ok(())
    }

    fn load(&self) -> Load {
        let bytes = self.size.unwrap_or(DEFAULT_BYTES);
        let form = match (&self.content, self.workload) {
            (Some(ContentArg::File(path)), _) => Form::File { path: path.clone() },
            (_, Workload::ManySmall) => {
                Form::Equal { count: self.count(), bytes: self.size.unwrap_or(SMALL_BYTES) }
            }
            (_, Workload::StateDict) => match self.model {
                Some(model) => Form::Model { model, scale: self.scale.unwrap_or(1.0) },
                None => Form::Generated { bytes },
            },
            _ => Form::Bulk { bytes },
        };
        let content = match (&self.content, self.workload) {
            (Some(ContentArg::Weights), _) | (None, Workload::StateDict) => Content::Weights,
            _ => Content::Random,
        };
        Load { form, content }
    }

    fn stream(&self, default_bytes: u64, pace: Pace) -> Work {
        Work::Stream { bytes: self.size.unwrap_or(default_bytes), pace }
    }

    fn count(&self) -> u32 {
        self.count.unwrap_or(DEFAULT_COUNT)
    }

    fn per_second(&self) -> u32 {
        self.per_second.unwrap_or(DEFAULT_PER_SECOND)
    }
}

impl Plan {
    /// The number of versions of the warm-up round.
    pub(crate) fn warm_up_versions(&self) -> u64 {
        (self.versions / WARM_UP_DIVISOR).max(1)
    }

    /// The duration of a counted round whose versions have a fixed rate, in whole seconds; 0 for other rounds.
    pub(crate) fn timetable_s(&self) -> u64 {
        match self.work {
            Work::Stream { pace: Pace::PerSecond(rate), .. } => {
                self.versions.div_ceil(u64::from(rate.max(1)))
            }
            _ => 0,
        }
    }
}

impl FromStr for ContentArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "random" => Self::Random,
            "weights" => Self::Weights,
            path => Self::File(path.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Parser, ValueEnum};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: WorkloadArgs,
    }

    fn plan(words: &str, consumers: usize) -> Result<Plan> {
        Cli::try_parse_from(["run"].into_iter().chain(words.split_whitespace()))?
            .args
            .plan(consumers)
    }

    fn load(words: &str) -> Load {
        match plan(words, 1).unwrap().work {
            Work::Version(load) => load,
            stream => panic!("{stream:?}"),
        }
    }

    #[test]
    fn defaults_are_those_of_the_help() {
        let bulk = Load { form: Form::Bulk { bytes: 1 << 30 }, content: Content::Random };
        assert_eq!(load(""), bulk);
        let small = Form::Equal { count: 10_000, bytes: 4096 };
        assert_eq!(load("--workload many-small").form, small);
        let dict = load("--workload state-dict --size 1MiB");
        assert_eq!(dict, Load { form: Form::Generated { bytes: 1 << 20 }, content: Content::Weights });
        let versions = plan("--workload versions", 1).unwrap();
        assert_eq!(versions.work, Work::Stream { bytes: 65_536, pace: Pace::PerSecond(1000) });
        assert_eq!((versions.versions, versions.timetable_s(), versions.warm_up_versions()), (5000, 5, 500));
        let latency = plan("--workload latency", 1).unwrap();
        assert_eq!(latency.work, Work::Stream { bytes: 4096, pace: Pace::AfterCommit });
        assert_eq!((latency.versions, latency.timetable_s()), (10_000, 0));
    }

    #[test]
    fn options_change_the_plan() {
        let model = load("--workload state-dict --model gpt2 --scale 0.5 --content random");
        assert_eq!(model.form, Form::Model { model: Model::Gpt2, scale: 0.5 });
        assert_eq!(model.content, Content::Random);
        assert_eq!(load("--content a.safetensors").form, Form::File { path: "a.safetensors".into() });
        let versions = plan("--workload versions --per-second 3 --seconds 7 --every", 1).unwrap();
        assert_eq!((versions.versions, versions.every), (21, true));
    }

    #[test]
    fn options_without_effect_are_refused() {
        for words in [
            "--model gpt2",
            "--workload state-dict --scale 1",
            "--workload state-dict --model gpt2 --size 1MiB",
            "--workload state-dict --model gpt2 --content a.safetensors",
            "--content a.safetensors --size 1MiB",
            "--workload latency --content a.safetensors",
            "--workload latency --content weights",
            "--workload bulk --count 3",
            "--workload latency --per-second 3",
            "--workload bulk --seconds 3",
            "--workload latency --every",
        ] {
            assert!(plan(words, 1).is_err(), "{words}");
        }
        assert!(plan("", 0).is_err());
        assert!(plan("--workload versions --per-second 1000000 --seconds 3600", 1).is_err());
    }

    #[test]
    fn every_consumer_takes_part_in_a_scene() {
        for workload in Workload::value_variants() {
            let plan =
                plan(&format!("--workload {}", workload.name()), workload.default_consumers()).unwrap();
            let mut taking_part: Vec<usize> = plan
                .scenes
                .iter()
                .flat_map(|s| s.readers.iter().chain(&s.slow))
                .copied()
                .collect();
            taking_part.sort_unstable();
            taking_part.dedup();
            assert_eq!(taking_part, (0..workload.default_consumers()).collect::<Vec<_>>(), "{workload:?}");
            assert_eq!(workload.to_possible_value().unwrap().get_name(), workload.name());
        }
        let scenes = |words, consumers| plan(words, consumers).map(|plan| plan.scenes);
        let slow = scenes("--workload slow-reader", 3).unwrap();
        assert_eq!((slow[0].slow, slow[1].slow, slow[1].readers.len()), (None, Some(2), 2));
        assert!(scenes("--workload slow-reader", 1).is_err());
        assert!(scenes("--workload fan-out", 1).is_err());
    }
}
