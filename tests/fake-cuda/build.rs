//! Gives the library the name by which programs load CUDA's driver.

/// The dynamic linker takes a library that is loaded already for the one that is asked for, when this name of theirs is
/// the same. So a test loads `libfake_cuda.so` by its path, and whoever asks for `libcuda.so` afterwards gets it.
fn main() {
    // Not `rustc-cdylib-link-arg`, which libraries inherit that depend on this package.
    println!("cargo::rustc-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
