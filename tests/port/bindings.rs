// A net that learns, from Rust: functions by their C names, structs as bytes whose sizes and places the library tells. Prints lines of
// tests/port/bindings.cpp.   rustc bindings.rs -L FOLDER -l moe && ./bindings
use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int, c_void};

extern "C" {
    fn moe_version() -> *const c_char;
    fn moe_struct_place(name: *const c_char, member: *const c_char, offset: *mut usize, size: *mut usize) -> c_int;
    fn moe_rng_seed(rng: *mut u64, seed: u64);
    fn moe_rng_normal(rng: *mut u64) -> f32;
    fn moe_net_init(net: *mut c_void, d_in: c_int, kernels: c_int, allocator: *const c_void) -> c_int;
    fn moe_net_linear(net: *mut c_void, d_out: c_int) -> c_int;
    fn moe_net_activation(net: *mut c_void, act: c_int) -> c_int;
    fn moe_net_mixture(net: *mut c_void, config: *const c_void) -> c_int;
    fn moe_net_build(net: *mut c_void, trainable: c_int, seed: u64, error: *mut c_void) -> c_int;
    fn moe_fit(net: *mut c_void, train: *const c_void, test: *const c_void, config: *const c_void, error: *mut c_void) -> c_int;
    fn moe_evaluate(net: *const c_void, data: *const c_void, criterion: c_int, result: *mut c_void, error: *mut c_void) -> c_int;
    fn moe_net_free(net: *mut c_void);
}

const KERNELS_C: c_int = 1; // MOE_KERNELS_C, MOE_ACT_RELU, MOE_CRITERION_CROSS_ENTROPY
const ACT_RELU: c_int = 0;
const CROSS_ENTROPY: c_int = 0;

struct Object {
    name: &'static str,
    bytes: Vec<u64>, // aligned for any struct
}

fn place(name: &str, member: Option<&str>) -> (usize, usize) {
    let (name, member) = (CString::new(name).unwrap(), member.map(|m| CString::new(m).unwrap()));
    let (mut offset, mut size) = (0, 0);
    let member = member.as_ref().map_or(std::ptr::null(), |m| m.as_ptr());
    assert_eq!(unsafe { moe_struct_place(name.as_ptr(), member, &mut offset, &mut size) }, 0);
    (offset, size)
}

impl Object {
    fn new(name: &'static str) -> Object {
        Object { name, bytes: vec![0; (place(name, None).1 + 7) / 8] }
    }
    fn pointer(&mut self) -> *mut c_void {
        self.bytes.as_mut_ptr() as *mut c_void
    }
    fn at<T>(&mut self, member: &str, inside: usize) -> *mut T {
        let (offset, _) = place(self.name, Some(member));
        unsafe { (self.pointer() as *mut u8).add(offset + inside) as *mut T }
    }
    fn set<T>(&mut self, member: &str, value: T) {
        assert_eq!(place(self.name, Some(member)).1, std::mem::size_of::<T>());
        unsafe { self.at::<T>(member, 0).write_unaligned(value) }
    }
}

fn main() {
    let n = 256usize;
    let mut error = Object::new("moe_error");
    let mut rng = 0u64;
    let x: Vec<f32> = unsafe {
        moe_rng_seed(&mut rng, 3);
        (0..n * 4).map(|_| moe_rng_normal(&mut rng)).collect()
    };
    let labels: Vec<i32> = (0..n).map(|i| (x[4 * i] > 0.0) as i32 + 2 * (x[4 * i + 1] * x[4 * i + 2] > 0.0) as i32).collect();
    let mut net = Object::new("moe_net");
    let mut small = Object::new("moe_layer_config");
    let mut data = Object::new("moe_data");
    let mut training = Object::new("moe_train_config");
    let mut seen = Object::new("moe_evaluation");
    unsafe {
        println!("version {}", CStr::from_ptr(moe_version()).to_str().unwrap());
        let experts = place("moe_router_config", Some("n_experts")).0;
        *small.at::<c_int>("router", experts) = 4;
        small.set::<c_int>("d_ff", 8);
        assert_eq!(moe_net_init(net.pointer(), 4, KERNELS_C, std::ptr::null()), 0);
        moe_net_linear(net.pointer(), 8);
        moe_net_activation(net.pointer(), ACT_RELU);
        moe_net_mixture(net.pointer(), small.pointer());
        moe_net_linear(net.pointer(), 4);
        assert_eq!(moe_net_build(net.pointer(), 1, 5, error.pointer()), 0);
        data.set("n", n);
        data.set("x", x.as_ptr());
        data.set("labels", labels.as_ptr());
        training.set::<c_int>("epochs", 20);
        training.set::<f32>("rate", 0.01);
        training.set::<u64>("seed", 9);
        assert_eq!(moe_fit(net.pointer(), data.pointer(), std::ptr::null(), training.pointer(), error.pointer()), 0);
        assert_eq!(moe_evaluate(net.pointer(), data.pointer(), CROSS_ENTROPY, seen.pointer(), error.pointer()), 0);
        println!("learned {:.5} {:.4}", *seen.at::<f32>("loss", 0), *seen.at::<f32>("accuracy", 0));
        moe_net_free(net.pointer());
    }
}
