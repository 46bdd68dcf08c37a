//! Programs load the fake driver if a test arranges it, and never by accident.

use std::{env, fs, process::Command};

use cudarc::driver::sys;
use tensor_relay_tests::fake_cuda::{self, Installed, Library, SYMBOLS};

use crate::calls::{Current, function};

/// The environment variable that makes this test binary a child process, which prints what driver it finds and exits.
const CHILD: &str = "FAKE_CUDA_CHILD";

#[test]
fn child() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: this only checks whether the library can be loaded.
    let present = unsafe { sys::is_culib_present() };
    if !present {
        println!("found: nothing");
        return;
    }
    let Some(init) = function::<unsafe extern "C" fn(u32) -> u32>("cuInit") else {
        println!("found: no cuInit");
        return;
    };
    // SAFETY: `cuInit` has this type, and may be called at any time.
    let started = unsafe { init(0) };
    println!("found: {started}");
    if started == 0 && function::<unsafe extern "C" fn()>("cuCtxSetCurrent").is_some() {
        std::mem::forget(Current::new(0));
    }
}

/// What a child process with this library prints. The environment variable `removed` is not passed to it.
fn found_by_child(installed: &Installed, removed: Option<&str>) -> String {
    let mut command = Command::new(env::current_exe().expect("a test knows its executable"));
    command
        .args(["--exact", "loading::child", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1");
    command.envs(installed.environment());
    if let Some(name) = removed {
        command.env_remove(name);
    }
    let output = command.output().expect("the test can be started again");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find_map(|line| line.split_once("found: "));
    line.unwrap_or_else(|| panic!("{stdout} {}", String::from_utf8_lossy(&output.stderr)))
        .1
        .to_owned()
}

#[test]
fn an_allowed_child_finds_the_driver_and_writes_a_report() {
    let installed = Installed::new(Library::Fake);
    assert_eq!(found_by_child(&installed, None), "0");
    let report = installed.report();
    assert_eq!((report.processes, report.violations.len(), report.at_exit.len()), (1, 0, 1));
    assert_eq!(report.at_exit[0].contexts, 1, "the child did not release its context: {report:?}");
}

#[test]
fn there_is_no_device_unless_the_fake_driver_is_allowed() {
    let installed = Installed::new(Library::Fake);
    assert_eq!(found_by_child(&installed, Some("TENSOR_RELAY_FAKE_CUDA")), "100");
    assert_eq!(installed.report().processes, 0);
}

#[test]
fn broken_libraries_behave_as_described() {
    assert_eq!(found_by_child(&Installed::new(Library::Stub), None), "34");
    assert_eq!(found_by_child(&Installed::new(Library::TooOld), None), "0");
    assert_eq!(found_by_child(&Installed::new(Library::Empty), None), "no cuInit");
}

/// Programs search for `libcuda.so` by file name, and must not find this library. Once a test has loaded it, the
/// dynamic linker finds it by its soname.
#[test]
fn the_file_name_differs_from_the_soname() {
    let library = fake_cuda::library();
    assert_eq!(library.file_name().unwrap(), "libfake_cuda.so");
    let bytes = fs::read(&library).unwrap();
    let has = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
    assert!(has(b"\0libcuda.so\0"), "its soname is libcuda.so");
    assert!(has(b"Fake CUDA device, for tests only"), "its device names say that they are fake");
}

#[test]
fn all_listed_functions_exist() {
    let _fake = fake_cuda::load();
    for symbol in SYMBOLS {
        assert!(function::<unsafe extern "C" fn()>(symbol).is_some(), "{symbol}");
    }
}
