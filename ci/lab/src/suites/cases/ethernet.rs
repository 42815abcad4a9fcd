//! Ethernet through the functions: two network namespaces that reach each other by ARP, IP and the
//! connection manager only.

use super::case::Case;

/// Puts the second function's interface into a namespace of its own, with its address, unless an earlier case did; no
/// case moves it back. The guest gave the first interface a permanent entry for the second one's address; this removes
/// it, unless the link went down and the entry with it.
const PART: &str = r#"
/usr/bin/ip netns list | grep -q "^far" || {
    /usr/bin/ip netns add far &&
    /usr/bin/ip link set eth1 netns far &&
    /usr/bin/ip -n far link set lo up &&
    /usr/bin/ip -n far link set eth1 up &&
    /usr/bin/ip -n far address add 10.0.0.2/24 dev eth1 &&
    /usr/bin/ip neighbour flush to 10.0.0.2 dev eth0 nud permanent
} || fail "cannot part the interfaces"
"#;

/// Fetches a file over TCP in both directions and compares it.
const TRANSFER: &str = r#"
directory=$(mktemp -d) && cd $directory || exit 1
head -c 4194304 /dev/urandom >sent
far="/usr/bin/ip netns exec far"
$far httpd -f -p 10.0.0.2:8000 -h $directory & there=$!
httpd -f -p 10.0.0.1:8000 -h $directory & here=$!
until_true "tcp 8000" || exit 1
# The other server listens at 10.0.0.2:8000, which only its namespace lists.
until_true "grep -qE '0200000A:1F40 [0-9A-F]+:0000 0A' /proc/$there/net/tcp" || exit 1
timeout 60 wget -q -O got http://10.0.0.2:8000/sent; cmp sent got || fail "from there"
timeout 60 $far wget -q -O back http://10.0.0.1:8000/sent; cmp sent back || fail "to there"
kill $there $here
"#;

/// Each case also runs alone.
pub(crate) fn cases() -> Vec<Case> {
    let far = "/usr/bin/ip netns exec far";
    let parted = |name: &str, script: &str| Case::as_root(name, format!("{PART}\n{script}"));
    let managed = |name: &str, server: &str, client: &str| {
        parted(name, &Case::pair(name, "cm", &format!("{far} {server}"), client).script)
    };
    let large_frames = "/usr/bin/ip link set eth0 mtu 4000 && /usr/bin/ip -n far link set eth1 mtu 4000 || \
                        fail \"the MTU cannot be changed\"\n\
                        ping -c 2 -W 5 -s 3800 10.0.0.2 || fail \"no answer\"";
    // Where the device's checksum is wrong, the kernel computes its own and reports "hw csum failure".
    let sums = "! dmesg | grep -A3 \"hw csum failure\" || fail \"the device's sums are wrong\"";
    vec![
        parted(
            "ethernet::arp",
            "ping -c 3 -W 5 10.0.0.2 || fail \"no answer\"\n\
             /usr/bin/ip neighbour show to 10.0.0.2 | grep -q lladdr || fail \"no neighbour\"",
        ),
        parted("ethernet::tcp", TRANSFER),
        parted("ethernet::large_frames", &format!("{large_frames}\n{TRANSFER}")),
        parted("ethernet::sums", &format!("{TRANSFER}\n{sums}")),
        managed(
            "ethernet::rping",
            "rping -s -a 10.0.0.2 -C 20 -V",
            "rping -c -a 10.0.0.2 -C 20 -V",
        ),
        managed("ethernet::udaddy", "udaddy -b 10.0.0.2", "udaddy -s 10.0.0.2"),
    ]
}
