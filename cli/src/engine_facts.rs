//! What the code in caches of inference engines depends on, on this machine: its processor, GPU and driver, and the
//! versions in a Python environment.

use std::{process::Stdio, time::Duration};
use tensor_relay_device::cuda::{self, SurveyedGpu};
use tensor_relay_server::Facts;
use tokio::process::Command;

/// A Python program, whose function `facts` returns the facts of the interpreter's environment and which prints them as
/// JSON. It imports none of the packages.
pub const PYTHON_PROGRAM: &str = include_str!("engine_facts.py");

/// How long the interpreter may take: many packages on a slow network folder.
const PYTHON_TIMEOUT: Duration = Duration::from_secs(30);

/// The facts of the machine. Takes up to a second, because the GPUs are asked; blocks.
pub fn machine_facts() -> Facts {
    let mut facts = Facts::default();
    facts.set("platform", format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH));
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    facts.set("cpu", processor_of(&processor));
    let gpus = cuda::survey().gpus.unwrap_or_default();
    let fact = |of: fn(&SurveyedGpu) -> Option<String>| {
        let mut values: Vec<String> = gpus.iter().filter_map(of).collect();
        values.sort();
        values.dedup();
        if values.is_empty() { "none".to_owned() } else { values.join(", ") }
    };
    facts.set("gpu", fact(|gpu| Some(gpu.info.name.clone())));
    facts.set("driver", fact(|gpu| gpu.driver_version.clone()));
    facts.set(
        "compute_capability",
        fact(|gpu| {
            let (major, minor) = gpu.info.compute_capability;
            Some(format!("{major}.{minor}"))
        }),
    );
    facts
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
        Err(reason) => crate::log::message!(
            "warning: which versions of torch, triton and vLLM are here is not known ({reason}): put the engine's \
             python3 into PATH, or give them (--engine-fact torch=VERSION)"
        ),
    }
    facts.extend(given.iter().cloned());
    Ok(facts)
}

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

    #[test]
    fn the_machine_has_the_facts_of_every_machine() {
        let facts = machine_facts();
        for fact in ["platform", "cpu", "gpu", "driver", "compute_capability"] {
            assert!(facts.get(fact).is_some_and(|value| !value.is_empty()), "{fact}");
        }
    }
}
