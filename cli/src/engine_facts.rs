//! What the code in caches of inference engines depends on, on this machine: its processor, GPU and driver, and the
//! versions in a Python environment.

use std::{collections::BTreeSet, io, process::Stdio, time::Duration};
use tensor_relay_device::cuda::{self, CudaError, SurveyedGpu};
use tensor_relay_server::Facts;
use tokio::process::Command;

/// A Python program, whose function `facts` returns the facts of the interpreter's environment and which prints them as
/// JSON. It imports none of the packages.
pub const PYTHON_PROGRAM: &str = include_str!("engine_facts.py");

/// How long the interpreter may take: many packages on a slow network folder.
const PYTHON_TIMEOUT: Duration = Duration::from_secs(30);

/// The facts of a Python environment, which [`PYTHON_PROGRAM`] finds out.
const PYTHON_FACTS: [&str; 6] = ["python", "libc", "torch", "triton", "vllm", "cuda"];

/// The value of a fact about something that is not here.
const NONE: &str = "none";

/// The facts of the machine. Takes up to a second, because the GPUs are asked; blocks.
pub fn machine_facts() -> Facts {
    let mut facts = Facts::default();
    facts.set("platform", format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH));
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    facts.set("cpu", processor_of(&processor));
    facts.extend(gpu_facts(cuda::survey().gpus));
    facts
}

/// The facts of the GPUs: not known if the driver does not answer, or does not say.
fn gpu_facts(gpus: Result<Vec<SurveyedGpu>, CudaError>) -> [(String, String); 3] {
    let gpus = match gpus {
        Err(CudaError::NoLibrary { .. } | CudaError::NoDevice) => Some(vec![]),
        gpus => gpus.ok(),
    };
    let fact = |name: &str, of: fn(&SurveyedGpu) -> Option<String>| {
        let values: Option<BTreeSet<String>> = gpus.as_ref().and_then(|gpus| gpus.iter().map(of).collect());
        let value = match values {
            None => Facts::UNKNOWN.to_owned(),
            Some(values) if values.is_empty() => NONE.to_owned(),
            Some(values) => values.into_iter().collect::<Vec<_>>().join(", "),
        };
        (name.to_owned(), value)
    };
    let capability = |gpu: &SurveyedGpu| {
        let (major, minor) = gpu.info.compute_capability;
        Some(format!("{major}.{minor}"))
    };
    [
        fact("gpu", |gpu| Some(gpu.info.name.clone())),
        fact("driver", |gpu| gpu.driver_version.clone()),
        fact("compute_capability", capability),
    ]
}

/// Why facts may not be those of the engine, for which they stand. Report it to the operator.
pub fn fact_doubts(facts: &Facts) -> Vec<&'static str> {
    let is = |value, fact: &&str| facts.get(fact) == Some(value);
    let mut doubts = vec![];
    if ["torch", "triton", "vllm"].iter().all(|package| is(NONE, package)) {
        doubts.push(
            "neither torch, triton nor vLLM is in the Python environment, which may not be the engine's",
        );
    }
    if is(NONE, &"gpu") {
        doubts.push("no GPU is visible: if the engine has one, state its gpu, driver and compute_capability");
    }
    if PYTHON_FACTS.iter().any(|fact| is(Facts::UNKNOWN, fact)) {
        doubts.push("the Python environment is not known, so that no cache fits until its facts are stated");
    }
    if ["gpu", "driver"].iter().any(|fact| is(Facts::UNKNOWN, fact)) {
        doubts.push("the GPU or its driver is not known, so that no cache fits until these facts are stated");
    }
    doubts
}

/// The processor's model and a digest of what it can do: Inductor compiles C++ for exactly that (`-march=native`).
fn processor_of(cpuinfo: &str) -> String {
    let value = |keys: &[&str]| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines
            .find(|(key, _)| keys.contains(&key.trim()))
            .map_or("", |(_, value)| value.trim())
    };
    let model = match value(&["model name", "CPU part"]) {
        "" => "unknown",
        model => model,
    };
    let mut abilities: Vec<&str> = value(&["flags", "Features"]).split_whitespace().collect();
    abilities.sort_unstable();
    let digest = blake3::hash(abilities.join(" ").as_bytes()).to_hex();
    format!("{model}, features {}", &digest[..8])
}

/// The facts of the machine, those of the `python3` in `PATH`, and the `given` ones, which replace both.
pub(crate) async fn gather(given: &[(String, String)]) -> anyhow::Result<Facts> {
    let mut facts = tokio::task::spawn_blocking(machine_facts).await?;
    match python_facts().await {
        Ok(found) => facts.extend(found),
        Err(reason) => {
            crate::log::message!("warning: {reason}");
            facts.extend(PYTHON_FACTS.map(|fact| (fact.to_owned(), Facts::UNKNOWN.to_owned())));
        }
    }
    facts.extend(given.iter().cloned());
    for doubt in fact_doubts(&facts) {
        crate::log::message!(
            "warning: engine caches: {doubt} (put the engine's python3 into PATH; --engine-fact torch=VERSION)"
        );
    }
    Ok(facts)
}

/// The facts of `python3`; if there is none, nothing is in its environment.
async fn python_facts() -> Result<Facts, String> {
    let mut python = Command::new("python3");
    // Modules are found in the current folder first, which may be anybody's.
    python
        .arg("-c")
        .arg(PYTHON_PROGRAM)
        .current_dir("/")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = match tokio::time::timeout(PYTHON_TIMEOUT, python.output()).await {
        Err(_) => return Err(format!("python3 took more than {PYTHON_TIMEOUT:?}")),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            let mut facts = Facts::default();
            facts.extend(PYTHON_FACTS.map(|fact| (fact.to_owned(), NONE.to_owned())));
            return Ok(facts);
        }
        Ok(output) => output.map_err(|error| format!("python3: {error}"))?,
    };
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!(
            "python3 ended with {}: {}",
            output.status,
            text.lines().last().unwrap_or_default()
        ));
    }
    Facts::parse(&output.stdout).map_err(|error| format!("python3 printed something else: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_differ_by_model_or_features() {
        let intel = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: sse avx\nmodel name\t: other\n";
        assert_eq!(processor_of(intel), processor_of("model name: Xeon\nflags: avx sse\n"), "in any order");
        assert!(processor_of(intel).starts_with("Xeon, features "));
        assert_ne!(processor_of(intel), processor_of("model name: Xeon\nflags: sse avx avx512f\n"));
        assert!(processor_of("CPU part\t: 0xd4f\nFeatures\t: sve\n").starts_with("0xd4f"));
        assert!(processor_of("").starts_with("unknown"));
    }

    /// Goal: what is not here is `none`, and what could not be found out agrees with nothing, itself included.
    #[test]
    fn gpus_that_do_not_answer_are_not_known() {
        let facts = |gpus| {
            let mut facts = Facts::default();
            facts.extend(gpu_facts(gpus));
            facts
        };
        let gpu = |driver: Option<&str>| SurveyedGpu {
            info: cuda::DeviceInfo {
                ordinal: 0,
                name: "H100".into(),
                pci_bus_id: "0000:3b:00.0".into(),
                uuid: None,
                compute_capability: (9, 0),
                total_bytes: 100,
            },
            cuda_version: cuda::Version::OLDEST,
            driver_version: driver.map(str::to_owned),
            memory: None,
            processes: None,
        };
        let two = facts(Ok(vec![gpu(Some("570")), gpu(Some("570"))]));
        assert_eq!(
            ["gpu", "driver", "compute_capability"].map(|fact| two.get(fact)),
            [Some("H100"), Some("570"), Some("9.0")]
        );
        for absent in
            [Ok(vec![]), Err(CudaError::NoDevice), Err(CudaError::NoLibrary { reason: String::new() })]
        {
            let absent = facts(absent);
            assert_eq!(absent.get("driver"), Some("none"));
            assert_eq!(absent.differences(&absent), []);
        }
        let hung = CudaError::NoAnswer { device: "CUDA".into(), waited: PYTHON_TIMEOUT };
        let hung = facts(Err(hung));
        assert_eq!(hung.differences(&hung).len(), 3);
        let no_nvml = facts(Ok(vec![gpu(None)]));
        assert_eq!(no_nvml.differences(&no_nvml).len(), 1);
    }

    #[test]
    fn facts_that_may_not_be_those_of_the_engine_are_doubted() {
        let doubts = |set: &[(&str, &str)]| {
            let mut facts = Facts::default();
            for package in ["torch", "triton", "vllm", "gpu"] {
                facts.set(package, NONE);
            }
            facts.extend(set.iter().map(|(fact, value)| ((*fact).to_owned(), (*value).to_owned())));
            fact_doubts(&facts).iter().map(|doubt| &doubt[..7]).collect::<Vec<_>>()
        };
        assert_eq!(doubts(&[]), ["neither", "no GPU "]);
        assert_eq!(doubts(&[("triton", "3.4"), ("gpu", "H100")]), [""; 0]);
        assert_eq!(doubts(&[("torch", Facts::UNKNOWN), ("gpu", Facts::UNKNOWN)]), ["the Pyt", "the GPU"]);
    }

    /// Each fact of the environment is there, so that the other end compares it.
    #[tokio::test]
    async fn packages_that_are_missing_are_facts() {
        let facts = python_facts().await.unwrap();
        let found: BTreeSet<String> = facts.into_iter().map(|(fact, _)| fact).collect();
        assert_eq!(found, BTreeSet::from(PYTHON_FACTS.map(str::to_owned)));
    }

    #[test]
    fn the_machine_has_the_facts_of_every_machine() {
        let facts = machine_facts();
        for fact in ["platform", "cpu", "gpu", "driver", "compute_capability"] {
            assert!(facts.get(fact).is_some_and(|value| !value.is_empty()), "{fact}");
        }
    }
}
