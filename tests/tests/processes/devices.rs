//! Tensors on GPUs from the command line: `--device`, its budgets, its failures, and `tensor-relay devices`.
//!
//! These tests use the fake driver, whatever `TENSOR_RELAY_TEST_CUDA` is. At its end, each test checks for illegal uses
//! of the driver and, unless it allows them, for leaks. With that variable set to `fake`, the tests of the other
//! modules run on GPUs as well.

use crate::{failures::unknown_ticket, files};
use serde_json::Value;
use std::time::Duration;
use tensor_relay_tests::{
    fake_cuda::Library,
    processes::{ANY_PORT, Ended, Gpu, Home, Process, Serving, Signal, UdpProxy, fake_nvml},
    skip,
};

const ON_GPU: &str = "--device=cuda:0";

/// The time within which a process must end after its GPU has failed. Copies of the fake driver are much faster, so a
/// longer run is a hang.
const FAILED_WITHIN: Duration = Duration::from_secs(10);

/// A home with the model `w` of `bytes`, whose processes find `gpu`.
fn home(gpu: Gpu, bytes: usize) -> Home {
    let home = Home::with_gpu(gpu);
    files::write_noise(&home.path("w"), bytes, 1);
    home
}

/// Serves `w` from the GPU.
fn serve(home: &Home) -> Serving {
    home.serve(&["--topic=w=w", ON_GPU])
}

/// Receives `w` once on the GPU, and writes it to `out`.
fn subscribe(home: &Home, server: &Serving, out: &str) -> Ended {
    home.run(&["subscribe", server.ticket("w"), "--once", "--json", ON_GPU, "--out", out])
}

/// Checks that `out` holds the model.
#[track_caller]
fn assert_received(home: &Home, out: &str) {
    assert_eq!(home.files_in(out), ["w.safetensors"]);
    files::assert_same(&home.path("w"), &home.path(out).join("w.safetensors"));
}

/// Starts the program with `args` and additional environment variables.
fn start_with(home: &Home, variables: &[(&str, &str)], args: &[&str]) -> Process {
    let mut command = home.program();
    command.args(args).envs(variables.iter().copied());
    Process::start(command)
}

/// Serves `w` from a GPU whose driver fails as `fault` specifies.
fn serve_failing(home: &Home, fault: &str) -> Serving {
    let args = ["serve", "--json", ANY_PORT, "--topic=w=w", ON_GPU];
    Serving::wait_for_report(start_with(home, &[("FAKE_CUDA_FAULTS", fault)], &args))
}

/// Goal: all contents of files arrive byte for byte with a GPU at either end or both; each process reports its device.
/// Method: every dtype, scalars, empty and large tensors, and a sharded model, all four ways.
#[test]
fn every_file_is_transferred_from_and_to_a_gpu() {
    let home = Home::with_gpu(Gpu::fake());
    files::write_everything(&home.path("w"));
    files::write_sharded(&home.path("model"), 1);
    let devices = ["cpu", "cuda:0"];
    for from in devices {
        let args = ["--topic=w=w", "--topic=model=model", "--chunk-size=256KiB", "--device", from];
        let server = home.serve(&args);
        assert_eq!(server.report["device"], from);
        for to in devices {
            let out = format!("{from}-{to}");
            let args = ["--once", "--json", "--device", to, "--out", &out];
            for topic in ["w", "model"] {
                let args = [&["subscribe", server.ticket(topic)], &args[..]].concat();
                assert_eq!(home.run(&args).expect_code(0).json()["device"], to);
            }
            files::assert_same(&home.path("w"), &home.path(&out).join("w.safetensors"));
            files::assert_same_model(&home.path("model"), &home.path(&out).join("model"));
        }
        server.process.signal_and_wait(Signal::TERM).expect_code(0);
    }
}

/// Goal: the text output shows the device, and the command of `--exec` runs as usual. Method: a GPU on both sides,
/// without `--json`.
#[test]
fn plain_output_shows_the_device() {
    let home = home(Gpu::fake(), 3 << 20);
    let mut server = home.start(&["serve", ANY_PORT, "--topic=w=w", ON_GPU]);
    let read = server.wait_for_stderr("w: 1 tensor");
    assert!(read.contains("read in") && read.contains("uploaded to cuda:0 in"), "{read}");
    let ticket = server.wait_for_stdout("tickets");
    server.wait_for_stderr("serving from cuda:0 on");
    let exec = "--exec=echo $TENSOR_RELAY_VERSION > ran";
    let output = home.run(&["subscribe", &ticket, "--once", ON_GPU, exec]).expect_code(0);
    assert!(
        output.out.starts_with("w version 1: 1 tensor,") && output.out.contains(", on cuda:0"),
        "{output:?}"
    );
    assert_eq!(std::fs::read_to_string(home.path("ran")).unwrap(), "1\n");
    server.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: a device can be set by file and variable, like every option. Method: each of them, and a flag over both.
#[test]
fn a_device_is_set_by_file_variable_or_flag() {
    let home = home(Gpu::fake().with("FAKE_CUDA_DEVICES", "3"), 1000);
    std::fs::write(home.path("c.toml"), "[default]\ndevice = 'cuda:1'\n").unwrap();
    let device = |variables: &[(&str, &str)], args: &[&str]| {
        let all = ["serve", "--json", ANY_PORT, "--topic=w=w", "--config=c.toml"];
        let server = Serving::wait_for_report(start_with(&home, variables, &[&all, args].concat()));
        server.report["device"].as_str().unwrap().to_owned()
    };
    assert_eq!(device(&[], &[]), "cuda:1");
    let variable = [("TENSOR_RELAY_DEVICE", "cuda:2")];
    assert_eq!(device(&variable, &[]), "cuda:2");
    assert_eq!(device(&variable, &[ON_GPU]), "cuda:0");
    assert_eq!(device(&variable, &["--device=cpu", "--hold=borrow"]), "cpu");
}

/// Goal: without `--device`, CUDA is not loaded. Method: look for the driver among the libraries of a server and of a
/// subscriber on a machine with a GPU.
#[test]
fn cuda_is_not_loaded_without_a_device() {
    let home = home(Gpu::fake(), 1000);
    let server = home.serve(&["--topic=w=w"]);
    let mut follower = home.start(&["subscribe", server.ticket("w")]);
    follower.wait_for_stdout("w version 1");
    for process in [&server.process, &follower] {
        let files = process.mapped_files();
        assert!(!files.contains("cuda") && !files.contains("nvidia"), "{files}");
    }
    let on_gpu = serve(&home);
    assert!(
        on_gpu.process.mapped_files().contains("libfake_cuda.so"),
        "a loaded driver is among the mapped files"
    );
}

/// Goal: without CUDA, `--device cuda:0` is one clear error that says what is missing and what to do; no files remain.
/// Method: every command that has `--device`, and `devices`. Skipped on a machine with a driver.
#[test]
fn a_missing_driver_is_one_clear_error() {
    let home = Home::with_gpu(Gpu::of_this_machine());
    files::write_noise(&home.path("w"), 1000, 1);
    let listed = home.run(&["devices", "--json"]).expect_code(0);
    let reason = listed.json()["reason"].as_str().unwrap_or_default().to_owned();
    if !reason.contains("libcuda.so.1") {
        return skip("this machine has a CUDA driver");
    }
    assert_eq!(listed.json()["gpus"], Value::Array(vec![]));
    let plain = home.run(&["devices"]).expect_code(0);
    assert!(plain.out.is_empty() && plain.err.starts_with("no GPU can be used here: "), "{plain:?}");
    let causes = ["--device cuda:0 cannot be used", "libcuda.so.1", "--gpus all", "--device cpu"];
    home.run(&["serve", ANY_PORT, "--topic=w=w", ON_GPU]).expect_error(1, &causes);
    home.run(&["subscribe", &unknown_ticket("127.0.0.1:1"), ON_GPU, "--out=out"])
        .expect_error(1, &causes);
    home.run(&["demo", "--size=1MiB", ON_GPU]).expect_error(1, &causes);
    assert!(home.files_in("out").is_empty() && home.files_in("state").is_empty());
}

/// Goal: an invalid or outdated driver library is distinguished from a missing one. Method: a linker's stub, a library
/// without symbols, one with few symbols, a file that is not a library, an old version, no device, and the fake driver
/// without permission to be used.
#[test]
fn an_unusable_driver_is_reported() {
    let gpus = [
        (Gpu::from_library(Library::Stub), "stub"),
        (Gpu::from_library(Library::Empty), "has no function cu"),
        (Gpu::from_library(Library::TooOld), "has no function cu"),
        (Gpu::from_library(Library::Garbage), "could not be loaded"),
        (Gpu::fake().with("FAKE_CUDA_VERSION", "11080"), "supports CUDA 11.8, but 12.0 is needed"),
        (Gpu::fake().with("FAKE_CUDA_DEVICES", "0"), "no device that this process may use"),
        (Gpu::fake().with("TENSOR_RELAY_FAKE_CUDA", "0"), "no device that this process may use"),
    ];
    for (gpu, cause) in gpus {
        let home = home(gpu, 1000);
        let refused = home.run(&["serve", ANY_PORT, "--topic=w=w", ON_GPU]);
        refused.expect_error(1, &["--device cuda:0 cannot be used", cause]);
        let listed = home.run(&["devices", "--json"]).expect_code(0).json();
        assert!(listed["reason"].as_str().unwrap().contains(cause), "{listed}");
        home.serve(&["--topic=w=w"])
            .process
            .signal_and_wait(Signal::TERM)
            .expect_code(0);
    }
}

/// Goal: a server and a subscriber can name different GPUs; the error for a missing one lists those that exist. Method:
/// two GPUs, a server on one, a subscriber on the other, and a third number.
#[test]
fn processes_can_name_different_gpus() {
    let home = home(Gpu::fake().with("FAKE_CUDA_DEVICES", "2"), 5 << 20);
    let server = home.serve(&["--topic=w=w", "--device=cuda:1"]);
    subscribe(&home, &server, "out").expect_code(0);
    assert_received(&home, "out");
    let other = ["serve", ANY_PORT, "--topic=w=w", "--device=cuda:7"];
    home.run(&other)
        .expect_error(1, &["no device cuda:7", "sees 2, cuda:0 to cuda:1"]);
    for arg in ["cuda", "gpu", "cuda:x", "0"] {
        home.run(&["serve", "--topic=w=w", "--device", arg])
            .expect_error(2, &["--device", "cuda:0"]);
    }
}

/// Goal: options that contradict each other are usage errors, with a reason. Method: borrowed files on a GPU;
/// page-locked memory for less than two chunks.
#[test]
fn contradictory_options_are_refused() {
    let home = home(Gpu::fake(), 1000);
    let serve = ["serve", ANY_PORT, "--topic=w=w", ON_GPU];
    let serve_with = |more_args: &[&str]| home.run(&[&serve, more_args].concat());
    serve_with(&["--hold=borrow"])
        .expect_error(2, &["--hold borrow", "--device cuda:0", "only one of the two"]);
    home.run(&["serve", ANY_PORT, "--topic=w=w", "--socket=s", "--share-gpu"])
        .expect_error(2, &["--share-gpu", "add --device cuda:N"]);
    let causes = ["--pinned-mem is 5242880 bytes", "two chunks of 4194304 bytes", "8.00 MiB or more"];
    serve_with(&["--pinned-mem=5MiB"]).expect_error(2, &causes);
    serve_with(&["--pinned-mem=5MiB", "--chunk-size=8MiB"])
        .expect_error(2, &["8388608 bytes", "16.0 MiB or more"]);
    let ticket = unknown_ticket("127.0.0.1:1");
    home.run(&["subscribe", &ticket, ON_GPU, "--pinned-mem=4KiB"])
        .expect_error(2, &["4096 bytes", "8.00 MiB"]);
    home.run(&["demo", "--size=1MiB", "--pinned-mem=0"])
        .expect_error(2, &["--pinned-mem"]);
}

/// Goal: the least allowed page-locked memory is enough. Method: two slots at each end; the server's chunks are larger
/// than the client's slots.
#[test]
fn two_slots_suffice() {
    let home = home(Gpu::fake(), 40 << 20);
    let server = home.serve(&["--topic=w=w", ON_GPU, "--chunk-size=16MiB", "--pinned-mem=32MiB"]);
    let args = ["subscribe", server.ticket("w"), "--once", ON_GPU, "--pinned-mem=8MiB", "--out=out"];
    home.run(&args).expect_code(0);
    assert_received(&home, "out");
}

/// Goal: insufficient GPU memory is an error with numbers, on either side, and the other side continues. Method:
/// limits, and GPUs, that are smaller than the model.
#[test]
fn insufficient_gpu_memory_is_an_error() {
    const BYTES: usize = 20 << 20;
    let large = home(Gpu::fake(), BYTES);
    let small = home(Gpu::fake().with("FAKE_CUDA_MEM", "16777216"), BYTES);
    let limit = "--gpu-mem-limit=16MiB";
    let server = serve(&large);
    for (home, args, causes) in [
        (&large, &[ON_GPU, limit][..], ["16777216 bytes", "20971", "--gpu-mem-limit"]),
        (&small, &[ON_GPU], ["free", "16777216", "20971"]),
    ] {
        let refused = home.run(&[&["serve", ANY_PORT, "--topic=w=w"], args].concat());
        refused.expect_error(1, &[&["cannot upload w to cuda:0"], &causes[..]].concat());
        let receive = ["subscribe", server.ticket("w"), "--once", "--out=out"];
        let refused = home.run(&[&receive, args].concat());
        refused.expect_error(1, &causes);
        assert!(home.files_in("out").is_empty());
    }
    subscribe(&large, &server, "whole").expect_code(0);
    assert_received(&large, "whole");
}

/// Goal: a GPU that fails during a transfer ends its server with an error, so that it can be restarted; the subscriber
/// keeps no partial file, and nothing hangs. Method: the third device-to-host copy corrupts the device's context, as a
/// foreign kernel in the process would.
#[test]
fn a_failed_gpu_ends_its_server() {
    let home = home(Gpu::fake().allow_leaks(), 40 << 20);
    let server = serve_failing(&home, "@dtoh:3:700");
    let ended = home.run(&["subscribe", server.ticket("w"), "--once", ON_GPU, "--out=out", "--reconnect=0"]);
    assert!(ended.run_time < FAILED_WITHIN, "{ended:?}");
    ended.expect_error(3, &["the server is shutting down"]);
    assert!(home.files_in("out").is_empty());
    server
        .process
        .wait()
        .expect_error(1, &["cuda:0 has failed", "CUDA_ERROR_ILLEGAL_ADDRESS"]);
}

/// Goal: a GPU that fails in a subscriber ends it with an error about this machine; the server serves others. Method:
/// the third host-to-device copy corrupts the device's context; then a subscriber whose GPU works.
#[test]
fn a_failed_gpu_ends_its_subscriber() {
    let home = home(Gpu::fake().allow_leaks(), 40 << 20);
    let server = serve(&home);
    let args = ["subscribe", server.ticket("w"), "--once", ON_GPU, "--out=out"];
    let ended = start_with(&home, &[("FAKE_CUDA_FAULTS", "@htod:3:700")], &args).wait();
    assert!(ended.run_time < FAILED_WITHIN, "{ended:?}");
    ended.expect_error(1, &["cuda:0", "this machine", "CUDA_ERROR_ILLEGAL_ADDRESS"]);
    assert!(home.files_in("out").is_empty());
    subscribe(&home, &server, "whole").expect_code(0);
    assert_received(&home, "whole");
}

/// Goal: a single failed driver call does not affect a server, and causes at most an error in a subscriber; nothing is
/// torn or hangs. Method: driver calls for copies and events that fail once, at each end.
#[test]
fn one_failed_driver_call_tears_no_version() {
    let home = home(Gpu::fake().allow_leaks(), 40 << 20);
    let receive = |server: &Serving, fault, out: &str| {
        let args = ["subscribe", server.ticket("w"), "--once", ON_GPU, "--out", out];
        let ended = start_with(&home, &[("FAKE_CUDA_FAULTS", fault)], &args).wait();
        assert!(ended.run_time < FAILED_WITHIN, "{ended:?}");
        ended
    };
    for (number, fault) in ["cuMemcpyDtoHAsync_v2:3:2", "cuEventRecord:17:2"].into_iter().enumerate() {
        let (server, out) = (serve_failing(&home, fault), format!("server-{number}"));
        receive(&server, "", &out).expect_code(0);
        assert_received(&home, &out);
        server.process.signal_and_wait(Signal::TERM).expect_code(0);
    }
    let server = serve(&home);
    for (number, fault) in ["cuMemcpyHtoDAsync_v2:3:2", "cuEventRecord:5:2"].into_iter().enumerate() {
        let out = format!("client-{number}");
        let ended = receive(&server, fault, &out);
        match ended.code {
            Some(0) => assert_received(&home, &out),
            _ => {
                ended.expect_error(1, &["cuda:0", "this machine", "CUDA_ERROR_OUT_OF_MEMORY"]);
                assert!(home.files_in(&out).is_empty());
            }
        }
    }
}

/// Goal: with a GPU that hangs, the subscriber ends within its deadlines, and the server can be stopped. Method: the
/// second host-to-device copy never completes.
#[test]
fn a_hanging_gpu_ends_its_subscriber() {
    let home = home(Gpu::fake().allow_leaks(), 40 << 20);
    let server = serve(&home);
    let args = ["subscribe", server.ticket("w"), "--once", ON_GPU, "--out=out"];
    let ended = start_with(&home, &[("FAKE_CUDA_FAULTS", "@htod:2:hang")], &args).wait();
    assert!(ended.run_time < Duration::from_secs(50), "{ended:?}");
    ended.expect_error(1, &["cuda:0"]);
    assert!(home.files_in("out").is_empty());
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: kill -9 of either side during a transfer costs the other side only time, and no version is torn. Method: hold
/// the transfer, kill and restart the server, then the subscriber; the version arrives each time.
#[test]
fn a_transfer_between_gpus_survives_killed_processes() {
    let (home, mut proxy) = (home(Gpu::fake(), 64 << 20).over_quic(), UdpProxy::new());
    let args = ["--topic=w=w", "--state-dir=keys", "--chunk-size=1MiB", ON_GPU, &proxy.advertise()];
    let server = home.serve(&args);
    proxy.forward_to(server.listen(), 16 << 20);
    let (report, ticket) = (server.report.clone(), server.ticket("w").to_owned());
    let receive = |out| home.start(&["subscribe", &ticket, "--once", ON_GPU, "--out", out]);
    let subscriber = receive("first");
    proxy.wait_until_held();
    server.process.signal_and_wait(Signal::KILL);
    let server = home.serve_again(&report, &args);
    proxy.release();
    subscriber.wait().expect_code(0);
    assert_received(&home, "first");
    proxy.hold_after(16 << 20);
    let killed = receive("second");
    proxy.wait_until_held();
    killed.signal_and_wait(Signal::KILL);
    proxy.release();
    assert!(home.files_in("second").is_empty());
    receive("second").wait().expect_code(0);
    assert_received(&home, "second");
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: replaced files are uploaded and published, and the memory of old versions is reused. Method: five versions
/// from a server whose GPU memory has room for two.
#[test]
fn gpu_memory_of_old_versions_is_reused() {
    const BYTES: usize = 4 << 20;
    let room = (BYTES * 5 / 2).to_string();
    let home = home(Gpu::fake(), BYTES);
    let limit = format!("--gpu-mem-limit={room}");
    let server = home.serve(&["--topic=w=w", ON_GPU, &limit, "--watch", "--watch-interval=0.05"]);
    let mut follower = home.start(&["subscribe", server.ticket("w"), ON_GPU, "--json", "--out=out"]);
    follower.wait_for_stdout(r#""version":1,"#);
    for version in 2..=5 {
        files::replace(&home.path("w"), |path| files::write_noise(path, BYTES, version));
        follower.wait_for_stdout(&format!(r#""version":{version},"#));
        assert_received(&home, "out");
    }
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    follower.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Goal: the demo works with GPUs. Method: a small demo, with both kinds of output.
#[test]
fn the_demo_runs_on_a_gpu() {
    let home = Home::with_gpu(Gpu::fake());
    let args = ["demo", "--size=8MiB", "--versions=2", "--small=20", ON_GPU];
    let report = home.run(&[&args[..], &["--json"]].concat()).expect_code(0).json();
    assert_eq!((&report["all_bytes_equal"], &report["device"]), (&true.into(), &"cuda:0".into()));
    let plain = home.run(&args).expect_code(0);
    for part in ["both with their tensors on cuda:0", "all equal", "copied from cuda:0 and back to it"] {
        assert!(plain.out.contains(part), "{part:?}: {plain:?}");
    }
}

/// Goal: `devices` lists the information of the driver and NVML, as text and as JSON. Method: two GPUs, without NVML,
/// with an NVML that reports one of them and its processes, and with an NVML that finds no driver.
#[test]
fn devices_lists_all_gpus() {
    const MEMORY: u64 = 1 << 30;
    let gpu = || {
        Gpu::fake()
            .with("FAKE_CUDA_DEVICES", "2")
            .with("FAKE_CUDA_MEM", &MEMORY.to_string())
    };
    let without = Home::with_gpu(gpu()).run(&["devices", "--json"]).expect_code(0).json();
    assert_eq!(without["reason"], Value::Null);
    let [first, second] = &without["gpus"].as_array().unwrap()[..] else { panic!("{without}") };
    assert_eq!((&first["device"], &second["device"]), (&"cuda:0".into(), &"cuda:1".into()));
    assert_eq!((&first["total_bytes"], &first["processes"]), (&MEMORY.into(), &Value::Null));
    for key in ["name", "pci", "compute_capability", "cuda_version"] {
        assert!(first[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {first}");
    }
    let pci = second["pci"].as_str().unwrap();
    let nvml = format!("0000:fe:00.0,1,1;{pci},{MEMORY},{},77=?,42=268435456", MEMORY / 2);
    let home = Home::with_gpu(gpu().with_nvml(&fake_nvml()).with("FAKE_NVML", &nvml));
    let with = home.run(&["devices", "--json"]).expect_code(0).json();
    assert_eq!(with["gpus"][0]["processes"], Value::Null);
    assert_eq!(with["gpus"][1]["free_bytes"], MEMORY / 2);
    assert_eq!(with["gpus"][1]["driver_version"], "550.0.0-fake");
    let processes =
        serde_json::json!([{"pid": 42, "used_bytes": 256 << 20}, {"pid": 77, "used_bytes": null}]);
    assert_eq!(with["gpus"][1]["processes"], processes);
    let plain = home.run(&["devices"]).expect_code(0);
    let lines: Vec<&str> = plain.out.lines().collect();
    assert_eq!((lines.len(), plain.err.as_str()), (3, ""), "{plain:?}");
    assert!(lines[0].starts_with("DEVICE  NAME") && lines[2].contains("42 (256 MiB), 77"), "{plain:?}");
    let broken = Home::with_gpu(gpu().with_nvml(&fake_nvml()));
    assert_eq!(
        broken.run(&["devices", "--json"]).expect_code(0).json(),
        without,
        "an NVML without a driver is ignored"
    );
}
