//! The probe reports what is missing if there is no driver, or a library that only resembles one.

use std::{env, process::Command};

use tensor_relay_device::cuda::{CudaEngine, CudaError, CudaOptions, devices, probe};
use tensor_relay_tests::fake_cuda::{Installed, Library};

/// Marks the child process, which prints the result of the probe. A process probes once, so each case is a process.
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

fn found(which: Library, more: &[(&str, &str)]) -> String {
    let installed = Installed::new(which);
    let mut command = Command::new(env::current_exe().expect("a test knows its executable"));
    command
        .args(["--exact", "probe::child", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1");
    command.envs(installed.environment());
    command.envs(more.iter().copied());
    let output = command.output().expect("the test can be started again");
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find_map(|line| line.split_once("found: "));
    line.unwrap_or_else(|| panic!("{said} {}", String::from_utf8_lossy(&output.stderr)))
        .1
        .to_owned()
}

#[test]
fn a_driver_is_found() {
    let said = found(Library::Fake, &[("FAKE_CUDA_DEVICES", "2")]);
    assert_eq!(said, "a driver; opened: Ok(()); devices: Ok(2)");
    let said = found(Library::Fake, &[]);
    assert!(said.starts_with("a driver; opened: Err(\"There is no device cuda:1."), "{said}");
}

#[test]
fn a_machine_without_devices_is_told_from_one_without_a_driver() {
    let said = found(Library::Fake, &[("FAKE_CUDA_DEVICES", "0")]);
    assert!(said.starts_with("no device;"), "{said}");
    let said = found(Library::Fake, &[("TENSOR_RELAY_FAKE_CUDA", "0")]);
    assert!(said.starts_with("no device;"), "{said}");
}

#[test]
fn broken_and_foreign_libraries_are_named() {
    for (library, kind) in [
        (Library::Stub, "stub;"),
        (Library::TooOld, "no symbol;"),
        (Library::Empty, "no symbol;"),
        (Library::Garbage, "no library;"),
    ] {
        let said = found(library, &[]);
        assert!(said.starts_with(kind) && said.contains("opened: Err("), "{library:?}: {said}");
    }
    let said = found(Library::Fake, &[("FAKE_CUDA_VERSION", "11040")]);
    assert!(said.starts_with("too old;"), "{said}");
    for code in ["999", "803", "3"] {
        let fault = format!("cuInit:1:{code}:on");
        let said = found(Library::Fake, &[("FAKE_CUDA_FAULTS", &fault)]);
        assert!(said.starts_with("refused;") && said.contains(code), "{said}");
    }
}
