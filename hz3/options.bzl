# SPDX-License-Identifier: Apache-2.0
"""The build settings of hz3: the lane, link-time optimisation, and the options of hz3/config.h.

Called by: hz3/BUILD.bazel (hz3_settings), hz3/defs.bzl.
Owns: //hz3:lane, //hz3:lto, one //hz3:NAME per option, //hz3:defines.
Invariant: this is the one place where a setting becomes a compiler flag. An option left empty
keeps the lane's value from hz3/config.h, so a flag on the command line always means an override.

    bazel build //hz3:libhz3.so --config=scale --//hz3:large_cache=off
"""

LANES = ["fast", "scale", "checked", "tiny"]

# Each is documented in hz3/config.h; a new one needs a measured reason and a record.
OPTIONS = [
    "magazine_capacity",
    "magazine_bytes",
    "heap_bytes",
    "depot_bytes",
    "cool_bytes",
    "retain_min_bytes",
    "retain_max_bytes",
    "tick_ms",
    "cpus_per_shard",
    "large_cache",
    "checked",
]

SettingInfo = provider(doc = "The value of one build setting.", fields = ["value"])
DefinesInfo = provider(
    doc = "What the settings ask for.",
    fields = ["lane", "values", "lto"],
)

def _setting_impl(ctx):
    value = ctx.build_setting_value
    known = ctx.attr.known
    if known and value not in known:
        # `fail` alone would name the place in this file and not what the user typed.
        fail("%s: there is no '%s'; it is one of: %s" %
             (ctx.label, value, ", ".join([word for word in known if word])))
    if not known and value not in ["", "on", "off"] and (not value.isdigit() or len(value) > 18):
        fail("%s: '%s' is not on, off or a whole number below 10^18, such as 65536" % (ctx.label, value))
    return [SettingInfo(value = value)]

_setting = rule(
    implementation = _setting_impl,
    attrs = {"known": attr.string_list()},
    build_setting = config.string(flag = True),
)

def _defines_impl(ctx):
    lane = ctx.attr.lane[SettingInfo].value
    lto = ctx.attr.lto[SettingInfo].value == "on"
    values = {}
    flags = ["-DHZ3_LANE_%s=1" % lane.upper()]
    for target in ctx.attr.options:
        value = target[SettingInfo].value
        if value:
            values[target.label.name] = {"on": "1", "off": "0"}.get(value, value)
            flags.append("-DHZ3_%s=%s" % (target.label.name.upper(), values[target.label.name]))
    return [
        DefinesInfo(lane = lane, lto = "on" if lto else "off", values = values),
        platform_common.TemplateVariableInfo({
            "HZ3_COPTS": " ".join(flags + (["-flto"] if lto else [])),
            "HZ3_LINKOPTS": "-flto -O2" if lto else "-O2",
        }),
    ]

_defines = rule(
    implementation = _defines_impl,
    doc = "Make variables with the flags; unlike cc_library's defines they stay inside hz3.",
    attrs = {
        "lane": attr.label(providers = [SettingInfo]),
        "lto": attr.label(providers = [SettingInfo]),
        "options": attr.label_list(providers = [SettingInfo]),
    },
)

def hz3_settings():
    """Declares every build setting; called once, by hz3/BUILD.bazel."""
    _setting(
        name = "lane",
        build_setting_default = "fast",
        known = LANES,
        visibility = ["//visibility:public"],
    )
    _setting(
        name = "lto",
        build_setting_default = "off",
        known = ["off", "on"],
        visibility = ["//visibility:public"],
    )
    for option in OPTIONS:
        _setting(
            name = option,
            build_setting_default = "",
            visibility = ["//visibility:public"],
        )
    _defines(
        name = "defines",
        lane = ":lane",
        lto = ":lto",
        options = [":" + option for option in OPTIONS],
        visibility = ["//visibility:public"],
    )
