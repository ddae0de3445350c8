#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qkv_fuzz::bodies::yaml(bytes)));
