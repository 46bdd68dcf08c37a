//! The probe for CUDA reports what is missing if there is no driver, or only a library that resembles one.

use std::{env, process::Command};

use tensor_relay_device::cuda::{CudaEngine, CudaError, CudaOptions, devices, probe};
use tensor_relay_tests::fake_cuda::{Installed, Library};

/// The environment variable that makes this test binary a child process, which prints the result of the probe and
/// exits. A process probes only once, so each case needs its own.
const CHILD: &str = "CUDA_PROBE_CHILD";

#[test]
fn child() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let kind = match probe() {
        Ok(_) => "a driver",
        Err(CudaError::NoLibrary { .. }) => "no library",
        Err(CudaError::NoSymbol { .. }) => "no symbol",
        Err(CudaError::DriverTooOld { .. }) => "too old",
        Err(CudaError::Stub) => "stub",
        Err(CudaError::NoDevice) => "no device",
        Err(CudaError::Driver(_)) => "refused",
        Err(_) => "something else",
    };
    let open = CudaEngine::open(1, CudaOptions::default());
    let count = devices().map(|devices| devices.len());
    println!(
        "found: {kind}; opened: {:?}; devices: {count:?}",
        open.map(drop).map_err(|error| error.to_string())
    );
}

/// The result of the probe in a child process with this library and additional environment variables.
fn probe_in_child(library: Library, variables: &[(&str, &str)]) -> String {
    let installed = Installed::new(library);
    let mut command = Command::new(env::current_exe().expect("a test knows its executable"));
    command
        .args(["--exact", "probe::child", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1");
    command.envs(installed.environment());
    command.envs(variables.iter().copied());
    let output = command.output().expect("the test can be started again");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find_map(|line| line.split_once("found: "));
    line.unwrap_or_else(|| panic!("{stdout} {}", String::from_utf8_lossy(&output.stderr)))
        .1
        .to_owned()
}

#[test]
fn a_driver_is_found() {
    let result = probe_in_child(Library::Fake, &[("FAKE_CUDA_DEVICES", "2")]);
    assert_eq!(result, "a driver; opened: Ok(()); devices: Ok(2)");
    let result = probe_in_child(Library::Fake, &[]);
    assert!(result.starts_with("a driver; opened: Err(\"There is no device cuda:1."), "{result}");
}

#[test]
fn a_missing_device_is_not_reported_as_a_missing_driver() {
    let result = probe_in_child(Library::Fake, &[("FAKE_CUDA_DEVICES", "0")]);
    assert!(result.starts_with("no device;"), "{result}");
    let result = probe_in_child(Library::Fake, &[("TENSOR_RELAY_FAKE_CUDA", "0")]);
    assert!(result.starts_with("no device;"), "{result}");
}

#[test]
fn broken_and_foreign_libraries_are_reported() {
    for (library, kind) in [
        (Library::Stub, "stub;"),
        (Library::TooOld, "no symbol;"),
        (Library::Empty, "no symbol;"),
        (Library::Garbage, "no library;"),
    ] {
        let result = probe_in_child(library, &[]);
        assert!(result.starts_with(kind) && result.contains("opened: Err("), "{library:?}: {result}");
    }
    let result = probe_in_child(Library::Fake, &[("FAKE_CUDA_VERSION", "11040")]);
    assert!(result.starts_with("too old;"), "{result}");
    for code in ["999", "803", "3"] {
        let fault = format!("cuInit:1:{code}:on");
        let result = probe_in_child(Library::Fake, &[("FAKE_CUDA_FAULTS", &fault)]);
        assert!(result.starts_with("refused;") && result.contains(code), "{result}");
    }
}
