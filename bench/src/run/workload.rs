//! The workloads, their options, and the scenes of a run with these options.

use crate::relay::{Content, Form, Hold, Job, Load, Pace, Work, name_of};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
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
    /// Generated values.
    Generated(Content),
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
    /// The content of the tensors: `noise`, `weights`, or a safetensors FILE of the producer's machine. Default:
    /// `weights` for `state-dict`, else `noise`.
    #[arg(long, value_name = "noise|weights|FILE")]
    pub content: Option<ContentArg>,
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

/// A named job: one of the contenders of a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scene {
    pub(crate) name: String,
    pub(crate) job: Job,
}

const DEFAULT_BYTES: u64 = 1 << 30;
const SMALL_BYTES: u64 = 4 << 10;
const VERSION_BYTES: u64 = 64 << 10;
const DEFAULT_COUNT: u32 = 10_000;
const DEFAULT_PER_SECOND: u32 = 1_000;
const DEFAULT_SECONDS: u32 = 5;

/// The maximum number of versions in a round, whose latencies are kept in memory.
const VERSIONS_MAX: u64 = 10_000_000;

/// The rate of the slowest network for which the default deadline of a round suffices.
const SLOWEST_BYTES_PER_S: u64 = 10_000_000;

impl Workload {
    /// The default number of consumers.
    pub(crate) fn default_consumers(self) -> u32 {
        match self {
            Self::FanOut => 4,
            Self::SlowReader => 2,
            _ => 1,
        }
    }

    /// Its name on the command line and in results.
    pub(crate) fn name(self) -> String {
        name_of(&self)
    }

    /// The scenes for this number of consumers: their names, the numbers of measured consumers, and whether a slow one is
    /// beside them. The ratio of the first to the second is the result.
    fn scenes(self, consumers: u32) -> Result<Vec<(String, u32, bool)>> {
        let name = self.name();
        match self {
            Self::FanOut => {
                ensure!(consumers >= 2, "`{name}` compares several consumers with one: it needs two or more");
                Ok(vec![
                    (format!("{consumers} consumers"), consumers, false),
                    ("one consumer".into(), 1, false),
                ])
            }
            Self::SlowReader => {
                ensure!(consumers >= 2, "`{name}` needs two consumers or more: the last one is slow");
                let fast = consumers - 1;
                Ok(vec![
                    ("beside a slow one".into(), fast, true),
                    ("without the slow one".into(), fast, false),
                ])
            }
            _ => Ok(vec![(name, consumers, false)]),
        }
    }
}

impl WorkloadArgs {
    /// The scenes for this number of consumers.
    ///
    /// # Errors
    /// When options contradict each other.
    pub(crate) fn scenes(&self, consumers: u32, hold: Hold) -> Result<Vec<Scene>> {
        ensure!(consumers > 0, "at least one consumer is needed");
        self.check(hold)?;
        let work = match self.workload {
            Workload::Versions => {
                let versions = u64::from(self.per_second()) * u64::from(self.seconds());
                self.stream(VERSION_BYTES, Pace::PerSecond(self.per_second()), versions)?
            }
            Workload::Latency => self.stream(SMALL_BYTES, Pace::AfterCommit, self.count().into())?,
            _ => Work::Version(self.load()?),
        };
        let job =
            |receivers, has_slow| Job { work: work.clone(), hold, every: self.every, receivers, has_slow };
        let scene = |(name, receivers, has_slow)| Scene { name, job: job(receivers, has_slow) };
        Ok(self.workload.scenes(consumers)?.into_iter().map(scene).collect())
    }

    /// The default deadline of a round in seconds: ten minutes to prepare it, and the time that all consumers take at
    /// 10 MB/s and twice that of a timetable. For a file, an hour.
    pub(crate) fn deadline_s(&self, consumers: u32) -> u64 {
        const PREPARE_S: u64 = 660;
        let bytes = match (&self.content, self.workload) {
            (Some(ContentArg::File(_)), _) => return 3_600,
            (_, Workload::ManySmall | Workload::Latency) => {
                self.size.unwrap_or(SMALL_BYTES).saturating_mul(self.count().into())
            }
            (_, Workload::Versions) => 0,
            _ => self.size.unwrap_or(DEFAULT_BYTES),
        };
        let timetable_s = if self.workload == Workload::Versions { self.seconds().into() } else { 0 };
        PREPARE_S + 2 * timetable_s + bytes.saturating_mul(consumers.into()) / SLOWEST_BYTES_PER_S
    }

    /// Refuses options without effect: a result must not suggest that they had one.
    fn check(&self, hold: Hold) -> Result<()> {
        use Workload::{Bulk, FanOut, Latency, ManySmall, SlowReader, StateDict, Versions};
        let is = |workloads: &[Workload]| workloads.contains(&self.workload);
        let has_file = matches!(self.content, Some(ContentArg::File(_)));
        let name = self.workload.name();
        for (given, has_effect, option) in [
            (self.size.is_some(), !has_file, "--size"),
            (self.count.is_some(), is(&[ManySmall, Latency]), "--count"),
            (self.per_second.is_some(), is(&[Versions]), "--per-second"),
            (self.seconds.is_some(), is(&[Versions]), "--seconds"),
            (self.every, is(&[Versions]), "--every"),
            (has_file, is(&[Bulk, StateDict, FanOut, SlowReader]), "a file as --content"),
            (self.content.is_some() && !has_file, !is(&[Versions, Latency]), "--content"),
            (hold == Hold::Borrow, !is(&[Versions, Latency]), "--hold borrow"),
        ] {
            if given && !has_effect {
                bail!("{option} has no effect for `{name}` with these other options");
            }
        }
        Ok(())
    }

    fn load(&self) -> Result<Load> {
        let (bytes, count) = match self.workload {
            Workload::ManySmall => (self.size.unwrap_or(SMALL_BYTES), self.count()),
            _ => (self.size.unwrap_or(DEFAULT_BYTES), 1),
        };
        let form = match (&self.content, self.workload) {
            (Some(ContentArg::File(path)), _) => Form::File { path: path.clone() },
            (_, Workload::StateDict) => Form::Generated { bytes },
            _ => {
                let bytes = bytes.checked_mul(count.into()).context("--size times --count is too large")?;
                Form::Equal { bytes, count }
            }
        };
        let content = match (&self.content, self.workload) {
            (Some(ContentArg::Generated(content)), _) => *content,
            (None, Workload::StateDict) => Content::Weights,
            _ => Content::Noise,
        };
        Ok(Load { form, content })
    }

    fn stream(&self, default_bytes: u64, pace: Pace, versions: u64) -> Result<Work> {
        ensure!(versions <= VERSIONS_MAX, "{versions} versions in a round are more than {VERSIONS_MAX}");
        Ok(Work::Stream { bytes: self.size.unwrap_or(default_bytes), pace, versions })
    }

    fn count(&self) -> u32 {
        self.count.unwrap_or(DEFAULT_COUNT)
    }

    fn per_second(&self) -> u32 {
        self.per_second.unwrap_or(DEFAULT_PER_SECOND)
    }

    fn seconds(&self) -> u32 {
        self.seconds.unwrap_or(DEFAULT_SECONDS)
    }
}

impl FromStr for ContentArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match Content::from_str(text, false) {
            Ok(content) => Self::Generated(content),
            Err(_) => Self::File(text.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: WorkloadArgs,
    }

    fn args(words: &str) -> Result<WorkloadArgs> {
        Ok(Cli::try_parse_from(["run"].into_iter().chain(words.split_whitespace()))?.args)
    }

    fn scenes(words: &str, consumers: u32) -> Result<Vec<Scene>> {
        args(words)?.scenes(consumers, Hold::Stage)
    }

    fn work(words: &str) -> Work {
        scenes(words, 1).unwrap().remove(0).job.work
    }

    fn load(words: &str) -> Load {
        match work(words) {
            Work::Version(load) => load,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn defaults_are_those_of_the_help() {
        let bulk = Load { form: Form::Equal { bytes: 1 << 30, count: 1 }, content: Content::Noise };
        assert_eq!(load(""), bulk);
        let small = Form::Equal { bytes: 10_000 * 4096, count: 10_000 };
        assert_eq!(load("--workload many-small").form, small);
        let dict = load("--workload state-dict --size 1MiB");
        assert_eq!(dict, Load { form: Form::Generated { bytes: 1 << 20 }, content: Content::Weights });
        let versions = Work::Stream { bytes: 65_536, pace: Pace::PerSecond(1000), versions: 5000 };
        assert_eq!(work("--workload versions"), versions);
        let latency = Work::Stream { bytes: 4096, pace: Pace::AfterCommit, versions: 10_000 };
        assert_eq!(work("--workload latency"), latency);
        assert_eq!(args("").unwrap().deadline_s(1), 660 + 107);
        assert_eq!(args("--workload versions").unwrap().deadline_s(1), 660 + 10);
    }

    #[test]
    fn options_change_the_job() {
        let model = load("--workload state-dict --size 1MiB --content random");
        assert_eq!(model, Load { form: Form::Generated { bytes: 1 << 20 }, content: Content::Noise });
        assert_eq!(load("--content a.safetensors").form, Form::File { path: "a.safetensors".into() });
        let versions = scenes("--workload versions --per-second 3 --seconds 7 --every", 1).unwrap();
        assert!(versions[0].job.every);
        assert!(matches!(versions[0].job.work, Work::Stream { versions: 21, .. }));
    }

    #[test]
    fn options_without_effect_are_refused() {
        for words in [
            "--content a.safetensors --size 1MiB",
            "--workload latency --content a.safetensors",
            "--workload latency --content weights",
            "--workload bulk --count 3",
            "--workload latency --per-second 3",
            "--workload bulk --seconds 3",
            "--workload latency --every",
        ] {
            assert!(scenes(words, 1).is_err(), "{words}");
        }
        assert!(scenes("", 0).is_err());
        assert!(scenes("--workload versions --per-second 1000000 --seconds 3600", 1).is_err());
        assert!(args("--workload latency").unwrap().scenes(1, Hold::Borrow).is_err());
    }

    #[test]
    fn every_workload_has_a_scene_for_its_consumers() {
        for workload in Workload::value_variants() {
            let all =
                scenes(&format!("--workload {}", workload.name()), workload.default_consumers()).unwrap();
            let consumers = all[0].job.receivers + u32::from(all[0].job.has_slow);
            assert_eq!(consumers, workload.default_consumers(), "{workload:?}");
            assert_eq!(workload.to_possible_value().unwrap().get_name(), workload.name());
        }
        let of = |words, consumers| -> Vec<(u32, bool)> {
            let scenes = scenes(words, consumers).unwrap();
            scenes.iter().map(|scene| (scene.job.receivers, scene.job.has_slow)).collect()
        };
        assert_eq!(of("--workload slow-reader", 3), [(2, true), (2, false)]);
        assert_eq!(of("--workload fan-out", 3), [(3, false), (1, false)]);
        assert!(scenes("--workload slow-reader", 1).is_err());
        assert!(scenes("--workload fan-out", 1).is_err());
    }
}
