//! Sets the library's soname to that of CUDA's driver.

/// The dynamic linker reuses a loaded library that has the requested soname. So once a test has loaded
/// `libfake_cuda.so` by its path, later loads of `libcuda.so` return that library.
fn main() {
    // Not `rustc-cdylib-link-arg`, which dependent libraries inherit.
    println!("cargo::rustc-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
