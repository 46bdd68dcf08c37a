//! The GPU suite: one command that measures all that tensor-relay does with a GPU, and writes the results to files.
//!
//! Each part runs in a process of its own, with a deadline, and prints each result as a line. So a part that fails,
//! crashes or hangs does not affect the others, and the results that it printed before are kept. The documents are
//! rewritten after each part.

mod child;
mod document;
mod engine;
mod line;
mod loopback;
mod machine;
mod own_runtime;
mod parts;
mod passes;
mod payload;
mod stream;

pub use engine::DeviceArg;
pub use parts::{Job, Part};

use crate::{machine::memory_bytes, origin::Origin};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use document::{Document, Findings};
use line::{Cells, Line};
use own_runtime::OwnRuntime;
use parts::GPU;
use std::{
    fs,
    path::{Path, PathBuf},
    thread::available_parallelism,
    time::{Duration, Instant},
};
use tensor_relay_device::cuda;

/// The options of `gpu`.
#[derive(Debug, Clone, clap::Args)]
pub struct GpuArgs {
    /// The device: `cuda:0`, `cuda:1`, … or `host`, which needs no GPU and only shows that the suite runs.
    #[arg(long, default_value = "cuda:0")]
    pub device: DeviceArg,
    /// The folder for the documents.
    #[arg(long, env = "OUT", default_value = ".")]
    pub out: PathBuf,
    /// Tiny sizes and one pass, to check that everything runs. The documents are marked as no result.
    #[arg(long)]
    pub quick: bool,
    /// Runs only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub parts: Vec<Part>,
    /// The deadline of the suite in seconds. Parts for which no time remains are reported as failed.
    #[arg(long, default_value_t = 510)]
    pub limit_s: u64,
}

/// Runs all parts, writes the documents, and prints the Markdown document.
///
/// # Errors
/// When a part or a check failed, or the documents could not be written. All parts are run first.
pub async fn run(args: GpuArgs) -> Result<()> {
    let mut suite = Suite::begin(args).await;
    let parts = suite.args.parts.clone();
    let is_selected = |part: &&Part| **part != Part::Device && (parts.is_empty() || parts.contains(part));
    for part in Part::value_variants().iter().copied().filter(|part| is_selected(&part)) {
        suite.run(part).await;
        // An error is reported at the end, if it persists.
        let _ = suite.write();
    }
    suite.end()
}

/// Runs one part in this process, which the suite started for the part.
///
/// # Errors
/// The error of the part.
pub async fn run_part(part: Part, job: Job) -> Result<()> {
    let runtime = OwnRuntime::new("part", available_parallelism().map_or(2, usize::from).max(2))?;
    let result = runtime.run(part.run(job)).await?;
    // If the process exited while an engine is closing, the driver would have to release the device.
    let _ = tokio::task::spawn_blocking(|| cuda::all_closed(CLOSE_TIMEOUT)).await;
    result
}

/// The deadline for dropped engines to release the device, which takes milliseconds unless an engine hangs.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A run of the suite, and its documents.
struct Suite {
    args: GpuArgs,
    begun: Instant,
    /// The maximum payload, which depends on the free memory of this machine and its device.
    payload_max_bytes: u64,
    /// The path of the documents, without their extensions.
    path: PathBuf,
    document: Document,
}

impl Suite {
    /// Queries the device. If that fails, the documents report it, and the other parts run nevertheless, because their
    /// errors say more.
    async fn begin(args: GpuArgs) -> Self {
        let mut suite = Self {
            begun: Instant::now(),
            payload_max_bytes: u64::MAX,
            path: PathBuf::new(),
            document: Document {
                title: String::new(),
                is_result: false,
                origin: Origin::here(),
                version: env!("CARGO_PKG_VERSION"),
                settings: settings(&args),
                device: Cells::of([]),
                machine: machine::facts(),
                parts: vec![],
            },
            args,
        };
        let lines = suite.run(Part::Device).await;
        suite.set_device(&lines);
        suite
    }

    /// Records the properties of the device, names the documents after it, and sets the maximum payload.
    fn set_device(&mut self, lines: &[Line]) {
        for line in lines {
            if let Line::Fact(name, value) = line {
                self.document.device.0.insert(name.clone(), value.clone());
            }
        }
        let fact = |name| self.document.device.get(name).map(String::as_str);
        let kind = fact(parts::KIND).unwrap_or_default().to_owned();
        let name = fact("name").unwrap_or("unknown").to_owned();
        let free = fact(parts::FREE_BYTES).and_then(|bytes| bytes.parse().ok());
        let free = [free, memory_bytes("MemAvailable")].into_iter().flatten().min();
        self.payload_max_bytes = free.map_or(u64::MAX, |bytes: u64| bytes / PAYLOADS_MAX);
        self.document.is_result = kind == GPU && !self.args.quick;
        let (title, stem) = title_and_stem(&kind, &name, self.args.quick);
        self.path = unused_path(&self.args.out, &format!("{}-{stem}", self.document.origin.date));
        self.document.title = title;
    }

    /// Runs `part` in a process of its own, if enough time remains.
    async fn run(&mut self, part: Part) -> Vec<Line> {
        let begun = Instant::now();
        let remaining = Duration::from_secs(self.args.limit_s).saturating_sub(self.begun.elapsed());
        let output = if remaining < PART_DURATION_MIN {
            child::Output::failed("no time remained for it")
        } else {
            eprintln!("{} …", part.facts().title);
            child::run_part(part, &self.job(part, remaining), part.facts().deadline().min(remaining)).await
        };
        let seconds = begun.elapsed().as_secs_f64();
        let findings = Findings::new(part, seconds, self.payload_bytes(part), &output.lines, output.failure);
        for failure in findings.failures() {
            eprintln!("  FAILED: {failure}");
        }
        eprintln!("  {seconds:.1} s");
        self.document.parts.push(findings);
        output.lines
    }

    fn payload_bytes(&self, part: Part) -> u64 {
        let bytes = if self.args.quick { 0 } else { part.facts().bytes.min(self.payload_max_bytes) };
        (bytes - bytes % QUICK_BYTES).max(QUICK_BYTES)
    }

    fn job(&self, part: Part, remaining: Duration) -> Job {
        let (device, quick, bytes) = (self.args.device, self.args.quick, self.payload_bytes(part));
        let budget = if quick { Duration::ZERO } else { part.facts().budget().min(remaining / 2) };
        let budget_ms = budget.as_millis() as u64;
        Job { device, bytes, budget_ms, quick, scenario: None, shared: None, taker: None }
    }

    fn write(&self) -> Result<()> {
        fs::create_dir_all(&self.args.out)
            .with_context(|| format!("cannot make {}", self.args.out.display()))?;
        let texts = [self.document.markdown(), serde_json::to_string_pretty(&self.document)?];
        for (extension, text) in EXTENSIONS.iter().zip(texts) {
            let path = self.path.with_extension(extension);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Prints the Markdown document, and the paths of both documents. The error lists all failures.
    fn end(self) -> Result<()> {
        println!("{}", self.document.markdown());
        let mut failures = self.document.failures();
        failures.extend(self.write().err().map(|error| format!("{error:#}")));
        eprintln!("{}.md and .json", self.path.display());
        ensure!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
        Ok(())
    }
}

fn settings(args: &GpuArgs) -> Cells<String> {
    let parts: Vec<&str> = args.parts.iter().map(|part| part.name()).collect();
    Cells::of([("measured on", args.device.to_string()), ("quick", args.quick.to_string())])
        .and("only these parts", (!parts.is_empty()).then(|| parts.join(", ")))
}

/// The maximum number of payloads that a part holds at one time: two services, each with two versions at every reader, and
/// their sources.
const PAYLOADS_MAX: u64 = 16;

/// The payload of a quick run, a few chunks. Other payloads are a multiple of it.
const QUICK_BYTES: u64 = 4 << 20;

/// The remaining time below which no further part is begun.
const PART_DURATION_MIN: Duration = Duration::from_secs(5);

/// The kinds of device other than a GPU, with titles and file names that tell them from a result. The last is a device
/// that could not be queried.
const STAND_INS: [(&str, &str, &str); 3] = [
    ("fake", "FAKE: the suite on the tests' fake driver", "FAKE"),
    ("host", "HOST: the suite on the host engine, without a GPU", "HOST"),
    ("", "FAILED: the suite on a device that cannot be queried", "FAILED"),
];

/// The title and the stem of the file names, without the date, for a device of this `kind` and `name`.
fn title_and_stem(kind: &str, name: &str, is_quick: bool) -> (String, String) {
    let (title, stem) = match kind {
        GPU => (format!("GPU tensors on {name}"), slug(name)),
        _ => {
            let (_, title, stem) =
                STAND_INS.iter().find(|stand_in| stand_in.0 == kind).unwrap_or(&STAND_INS[2]);
            ((*title).to_owned(), (*stem).to_owned())
        }
    };
    match is_quick {
        true => (format!("{title}, quick run"), format!("gpu-{stem}-quick")),
        false => (title, format!("gpu-{stem}")),
    }
}

/// `name` in letters, digits and single dashes.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let slug = words.collect::<Vec<_>>().join("-").to_lowercase();
    if slug.is_empty() { "unknown".into() } else { slug }
}

/// The path in `folder` of documents with this `stem`, without their extensions; if files of that name exist, with the
/// first number appended that is unused.
fn unused_path(folder: &Path, stem: &str) -> PathBuf {
    let numbered = (1..).map(|number| match number {
        1 => folder.join(stem),
        _ => folder.join(format!("{stem}-{number}")),
    });
    let is_unused =
        |path: &PathBuf| EXTENSIONS.iter().all(|extension| !path.with_extension(extension).exists());
    numbered.into_iter().find(is_unused).expect("numbers do not end")
}

/// The extensions of the two documents.
const EXTENSIONS: [&str; 2] = ["md", "json"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documents_of_a_gpu_have_its_name() {
        let of = |kind, quick| title_and_stem(kind, "NVIDIA H100 80GB HBM3 (MIG 1g)", quick);
        assert_eq!(of(GPU, false).1, "gpu-nvidia-h100-80gb-hbm3-mig-1g");
        assert_eq!(of(GPU, true).1, "gpu-nvidia-h100-80gb-hbm3-mig-1g-quick");
        assert_eq!(of("fake", false).1, "gpu-FAKE");
        assert_eq!(of("", false).1, "gpu-FAILED");
        assert!(of("fake", false).0.contains("FAKE"));
    }

    #[test]
    fn existing_documents_are_not_overwritten() {
        let folder = std::env::temp_dir().join(format!("tensor-relay-bench-files-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("a.md"), "").unwrap();
        assert_eq!(unused_path(&folder, "a"), folder.join("a-2"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
