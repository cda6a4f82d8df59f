"""Start, find and stop the embedded Nessie and Spark Connect servers.

All their files are in one state folder:

    nessie/      RocksDB store            warehouse/   Iceberg data and metadata
    logs/        one file per server      run/         process records, lock, tokens
    jars/        where Ivy put the jars   spark/       scratch space
    tmp/         what the JVMs unpack
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

from branchlake_dagster.embedded import process
from branchlake_dagster.embedded import worker_daemon as daemon
from branchlake_dagster.embedded.jars import (
    ICEBERG_AWS,
    ICEBERG_SPARK,
    NESSIE_SERVER,
    SPARK_KAFKA,
    Jar,
    resolve_jars,
    spark_home,
)
from branchlake_dagster.embedded.java import (
    Archive,
    bundled_java,
    find_archive,
    spark_compiler_options,
    user_java,
)
from branchlake_dagster.embedded.process import LOOPBACK, ProcessRecord, keep_port, rotate_folder
from branchlake_dagster.embedded.rest_catalog import catalog_environment, catalog_flags
from branchlake_dagster.embedded.state_folder import (
    build_not_running,
    ensure_credentials,
    find_credentials,
    make_private_folder,
    make_state_folder,
    record_location,
    require_location,
    require_no_file,
    write_secret,
)
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within

NESSIE = "nessie"
SPARK = "spark"
_BUSY_S = 10.0
"""The seconds that a running server may take to accept a connection before it is restarted."""
AVRO_LIMITS = {
    "org.apache.avro.limits.bytes.maxLength": str(64 << 20),
    "org.apache.avro.limits.string.maxLength": str(64 << 20),
    "org.apache.avro.limits.collectionItems.maxLength": "10000000",
}
"""Java system properties of Spark's driver and executors. Avro allocates as many bytes and items as a value
declares. Without limits, six bytes that declare two billion items exhaust the heap and end Spark."""


@dataclass(frozen=True)
class Endpoints:
    """The addresses of a lake: Nessie's REST v2 URI and token, and Spark Connect's URL and token.

    `spark_remote` is None if no Spark server is known or needed. A token is None if the server requires none.
    """

    nessie_uri: str
    spark_remote: str | None
    spark_token: str | None
    nessie_token: str | None = None

    def __repr__(self) -> str:
        return f"Endpoints(nessie_uri={self.nessie_uri!r}, spark_remote={self.spark_remote!r})"


class EmbeddedServers:
    """The two servers of one state folder. Safe to use from several processes at once.

    `notify` gets messages about starts and downloads. With `volatile`, a newly started Nessie keeps its store
    in memory. With `recording`, newly started servers write class archives when they end, which takes long.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        notify: Callable[[str], None] = lambda _: None,
        volatile: bool = False,
        recording: bool = False,
    ) -> None:
        self._settings = settings
        self._volatile = volatile
        self._recording = recording
        self._root = settings.state_dir
        self._notify = notify

    def server_names(self) -> tuple[str, ...]:
        """Return the names of the servers that are embedded according to the settings, Nessie first."""
        servers = ((NESSIE, self._settings.embedded_nessie), (SPARK, self._settings.embedded_spark))
        return tuple(name for name, ours in servers if ours)

    def endpoints(self, *, spark: bool = True, start: bool = True) -> Endpoints:
        """Return the addresses of the servers. Starts servers that do not run. Rotates large logs.

        Costs two loopback connections if the servers run. `spark=False` neither needs nor starts Spark. With
        `start=False` it raises LakeNotRunning instead of starting a server, and creates no folder. Raises
        LakeMoved if the state folder was moved or copied.
        """
        names = tuple(name for name in self.server_names() if spark or name == NESSIE)
        records = self._find_running(names)
        if set(records) != set(names):
            if not start:
                records |= self._find_late_servers(tuple(name for name in names if name not in records))
                if set(records) == set(names):
                    return self._to_endpoints(records)
                raise build_not_running(self._root)
            with self.lock():
                records = self._find_running(names)
                records |= self._find_late_servers(tuple(name for name in names if name not in records))
                records |= self._start_servers(tuple(name for name in names if name not in records))
        return self._to_endpoints(records)

    def find_endpoints(self, *, spark: bool = True) -> Endpoints | None:
        """Return the addresses if all embedded servers run and answer, else None. Starts nothing.

        With `spark=False` the Spark server need not run. Raises LakeMoved as `endpoints` does.
        """
        names = tuple(name for name in self.server_names() if spark or name == NESSIE)
        records = self._find_running(names)
        return self._to_endpoints(records) if set(records) == set(names) else None

    def fetch_jars(self, *, s3: bool = False) -> dict[Jar, Path]:
        """Return the paths of the servers' jars, downloaded if necessary.

        With `s3`, or for a warehouse in S3, the jars for S3 are included. Raises the errors of
        `resolve_jars`.
        """
        jars = [ICEBERG_SPARK, *SPARK_KAFKA, NESSIE_SERVER]
        if s3 or self._settings.warehouse_uri.startswith("s3"):
            jars.append(ICEBERG_AWS)
        return resolve_jars(
            jars,
            make_state_folder(self._root) / "jars",
            ivy_settings=self._settings.ivy_settings,
            notify=self._notify,
        )

    def archives(self) -> dict[str, Archive]:
        """Return the class archive of each embedded server by name, whether its file exists or not.

        A server whose Java does not support archives is omitted.
        """
        jars = self.fetch_jars()
        make = {NESSIE: _nessie_archive, SPARK: _spark_archive}
        return {name: archive for name in self.server_names() if (archive := make[name](jars))}

    def status(self) -> dict[str, ProcessRecord | None]:
        """Return the record of each server by name; None for a server that does not run or answer."""
        records = self._find_running((NESSIE, SPARK))
        return {name: records.get(name) for name in (NESSIE, SPARK)}

    def find_process(self, name: str) -> ProcessRecord | None:
        """Return the record of the server `name` if its process runs, whether it answers or not; else None.

        Raises LakeMoved if the lake was moved or copied.
        """
        self._require_location()
        record = ProcessRecord.load(self._record_path(name))
        return record if record and record.is_alive() else None

    def stop_all(self) -> tuple[str, ...]:
        """Stop the running servers, Spark before Nessie, and return the names of the stopped servers."""
        self._require_location()  # the records in a copied folder name the processes of the original
        if not self._root.exists():
            return ()
        stopped_names = []
        with self.lock():
            for name in (SPARK, NESSIE):
                record = ProcessRecord.load(self._record_path(name))
                if record and process.stop_process(record):
                    stopped_names.append(name)
                self._record_path(name).unlink(missing_ok=True)
        return tuple(stopped_names)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock for starting and stopping servers. The kernel releases the lock of a dead process."""
        with file_lock(make_private_folder(self._root / "run") / "lock"):
            yield

    def log_path(self, name: str) -> Path:
        """Return the path of the log of the server `name`, whether it exists or not."""
        return self._root / "logs" / f"{name}.log"

    # -- internals -------------------------------------------------------------------------------------

    def _to_endpoints(self, records: dict[str, ProcessRecord]) -> Endpoints:
        settings = self._settings
        nessie_uri = settings.nessie_uri or f"http://{LOOPBACK}:{records[NESSIE].port}/api/v2"
        remote, token, nessie_token = settings.spark_remote, settings.spark_token, self._find_nessie_token()
        if SPARK in records:
            # Without TLS, pyspark's client accepts a token only for the host name localhost.
            local = f"sc://localhost:{records[SPARK].port}"
            return Endpoints(nessie_uri, local, self._load_spark_token(), nessie_token)
        return Endpoints(nessie_uri, remote, token.get_secret_value() if token else None, nessie_token)

    def _find_nessie_token(self) -> str | None:
        """Return the token of the settings, else the stored token of the embedded Nessie, if it has one."""
        if self._settings.nessie_token is not None:
            return self._settings.nessie_token.get_secret_value()
        stored_credentials = (
            find_credentials(self._credentials_path) if self._settings.embedded_nessie else None
        )
        return stored_credentials.token if stored_credentials else None

    @property
    def _credentials_path(self) -> Path:
        return self._root / "run" / "nessie.token"

    def _record_path(self, name: str) -> Path:
        return self._root / "run" / f"{name}.json"

    def _find_running(self, names: tuple[str, ...]) -> dict[str, ProcessRecord]:
        self._require_location()
        # Every use of the lake calls this function, sensors every few seconds. So nothing else watches logs.
        rotate_folder(self._root / "logs")
        records = ((name, ProcessRecord.load(self._record_path(name))) for name in names)
        return {
            name: record
            for name, record in records
            if record and record.is_alive() and process.is_listening(record.port)
        }

    def _find_late_servers(self, names: tuple[str, ...]) -> dict[str, ProcessRecord]:
        """Return the servers whose process runs and that accept a connection within `_BUSY_S` seconds.

        On a busy machine the kernel repeats the first packet of a connection after a second. A server that
        other processes use must not be stopped because of this.
        """
        late_records = {}
        for name in names:
            record = ProcessRecord.load(self._record_path(name))
            if record and record.is_alive() and _listens_within(record, _BUSY_S):
                late_records[name] = record
        return late_records

    def _require_location(self) -> None:
        require_no_file(self._root)
        if self._settings.embedded_nessie:
            require_location(self._root, tables_elsewhere=not self._settings.embedded_warehouse)

    def _start_servers(self, names: tuple[str, ...]) -> dict[str, ProcessRecord]:
        if NESSIE in names:
            bundled_java()  # raises before 300 MB are downloaded for nothing
            record_location(self._root)
        jars = self.fetch_jars()
        for name in names:
            stale_record = ProcessRecord.load(self._record_path(name))
            if stale_record and process.stop_process(stale_record):
                self._notify(f"Stopped a {name} server that did not answer (pid {stale_record.pid}).")
        nessie_port = self._choose_port(NESSIE, self._settings.nessie_port, names)
        started_records = {}
        # Both start at the same time: until its first query, Spark needs only Nessie's address.
        for name in names:
            record = (
                self._launch_nessie(jars, nessie_port)
                if name == NESSIE
                else self._launch_spark(jars, nessie_port)
            )
            # Save the record at once. If this process is killed now, the next caller finds and stops the
            # server. Otherwise an unknown process would hold the lock of the store.
            record.save(self._record_path(name))
            started_records[name] = record
        return {name: self._wait_until_ready(record) for name, record in started_records.items()}

    def _choose_port(self, name: str, wanted: int, starting_names: tuple[str, ...]) -> int:
        """Return the port for the server `name`.

        If the server is among `starting_names`, the port is free: `wanted` or, if that is 0, preferably the
        last port of the server. Otherwise, the server runs already, and the port in its record is returned;
        without a record, `wanted` is returned. Raises ConfigurationError and OSError.
        """
        if name not in starting_names:
            last_record = ProcessRecord.load(self._record_path(name))
            return last_record.port if last_record else wanted
        port_file = self._root / "run" / f"{name}.port"
        return keep_port(wanted, port_file, setting=f"BRANCHLAKE_{name.upper()}_PORT")

    def _launch_nessie(self, jars: dict[Jar, Path], port: int) -> ProcessRecord:
        self._notify("Starting Nessie …")
        flags = {
            **self._store_flags(),
            "quarkus.http.host": LOOPBACK,
            "quarkus.http.port": str(port),
            "quarkus.management.host": LOOPBACK,
            "quarkus.management.port": "0",
            "quarkus.http.access-log.enabled": "false",
            "quarkus.log.console.color": "false",
            **catalog_flags(self._settings),
        }
        if self._settings.guard_nessie:
            flags |= {
                "nessie.server.authentication.enabled": "true",
                "quarkus.oidc.tenant-enabled": "true",
                "quarkus.oidc.client-id": "branchlake",
                "quarkus.oidc.public-key": ensure_credentials(self._credentials_path).public_key,
            }
        else:
            self._credentials_path.unlink(missing_ok=True)
        # The second compiler takes half of the start time and does not make calls faster.
        command = [str(bundled_java()), "-Xms64m", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += [self._scratch_option(NESSIE), *self._archive_options(_nessie_archive(jars))]
        command += [f"-D{key}={value}" for key, value in flags.items()]
        command += ["-jar", str(jars[NESSIE_SERVER])]
        environment = catalog_environment(self._settings)
        return process.launch_server(
            NESSIE, command, log=self.log_path(NESSIE), environment=environment, port=port
        )

    def _store_flags(self) -> dict[str, str]:
        if self._volatile:
            return {"nessie.version.store.type": "IN_MEMORY"}
        store = make_private_folder(self._root / "nessie")
        return {
            "nessie.version.store.type": "ROCKSDB",
            "nessie.version.store.persist.rocks.database-path": str(store),
        }

    def _scratch_option(self, name: str) -> str:
        """Return the JVM option for an empty temporary folder.

        A JVM unpacks 15 MB of native libraries there at each start, and a killed JVM leaves them behind.
        """
        folder = self._root / "tmp" / name
        shutil.rmtree(folder, ignore_errors=True)  # the previous JVM, which used it, has ended
        return f"-Djava.io.tmpdir={make_private_folder(folder)}"

    def _launch_spark(self, jars: dict[Jar, Path], nessie_port: int) -> ProcessRecord:
        self._notify("Starting Spark Connect …")
        settings = self._settings
        port = self._choose_port(SPARK, settings.spark_port, (SPARK,))
        scratch = make_private_folder(self._root / "spark")
        home, java = spark_home(), user_java()
        nessie_uri = settings.nessie_uri or f"http://{LOOPBACK}:{nessie_port}/api/v2"
        conf = {
            "spark.connect.grpc.binding.address": LOOPBACK,
            "spark.connect.grpc.binding.port": str(port),
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.local.dir": str(scratch),
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
            **catalog_conf(settings, nessie_uri),
        }
        if settings.spark_master.startswith("local"):
            # Other accounts can reach the loopback address. Spark generates the secret of its ports itself.
            conf["spark.authenticate"] = "true"
        paths = [str(path) for path in _spark_jars(jars)]
        command = [str(home / "bin" / "spark-submit"), "--master", settings.spark_master]
        command += ["--driver-memory", settings.spark_driver_memory]
        # Class archives cover the class path, but not the jars of `--jars`, which separate executors need.
        command += ["--driver-class-path", os.pathsep.join(paths)]
        if not settings.spark_master.startswith("local"):
            command += ["--jars", ",".join(paths)]
        conf_folder = os.environ.get("SPARK_CONF_DIR")
        options: list[str] = []
        if not conf_folder:
            options += [f"-Dlog4j2.configurationFile={process.write_log_config(scratch / 'conf').as_uri()}"]
            options += [self._scratch_option(SPARK)]
            options += avro_options()
            options += self._archive_options(_spark_archive(jars, java))
            if settings.spark_master.startswith("local"):
                options += spark_compiler_options(os.cpu_count() or 1)
            if not settings.spark_master.startswith("local"):
                conf["spark.executor.extraJavaOptions"] = " ".join(avro_options())
            # The workers run on this machine, so they can be forked from a process with imported libraries.
            if settings.spark_master.startswith("local") and sys.platform == "linux":
                conf["spark.python.daemon.module"] = daemon.__name__
        # The JVM uses the last of several values of an option.
        options += shlex.split(settings.spark_java_options or "")
        if options:
            command += ["--driver-java-options", " ".join(map(_quote_java_option, options))]
        for key, value in conf.items():
            command += ["--conf", f"{key}={value}"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        environment = {
            "SPARK_HOME": str(home),
            "JAVA_HOME": str(java.resolve().parent.parent),
            "SPARK_LOCAL_IP": LOOPBACK,
            # The server starts its Python workers with this Python. spark.pyspark.python has no effect here.
            "PYSPARK_PYTHON": sys.executable,
            daemon.FOLDER_VARIABLE: str(self._root / "tmp" / SPARK),
            "SPARK_CONNECT_AUTHENTICATE_TOKEN": self._load_spark_token(),
            # Options of the short-lived JVM that only builds the command: its second compiler never pays off.
            "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            # A folder with files on the class path prevents an archive. This folder does not exist.
            "SPARK_CONF_DIR": conf_folder or str(home / "no-conf"),
            **s3_environment(settings),
        }
        return process.launch_server(
            SPARK, command, log=self.log_path(SPARK), environment=environment, port=port
        )

    def _archive_options(self, archive: Archive | None) -> list[str]:
        if archive is None:
            return []
        return archive.record_options() if self._recording else archive.use_options()

    def _wait_until_ready(self, record: ProcessRecord) -> ProcessRecord:
        ready = _nessie_answers if record.name == NESSIE else process.is_listening
        process.wait_until(
            lambda: ready(record.port),
            record,
            log=self.log_path(record.name),
            timeout_s=self._settings.startup_timeout_s,
        )
        self._notify(f"{record.name} answers on port {record.port} (pid {record.pid}).")
        return record

    def _load_spark_token(self) -> str:
        path = self._root / "run" / "spark.token"
        if not path.exists():
            write_secret(path, secrets.token_urlsafe(24))
        return path.read_text()


def avro_options() -> list[str]:
    """Return `AVRO_LIMITS` as JVM options."""
    return [f"-D{name}={limit}" for name, limit in AVRO_LIMITS.items()]


def _spark_jars(jars: dict[Jar, Path]) -> list[Path]:
    return [path for jar, path in jars.items() if jar is not NESSIE_SERVER]


def _nessie_archive(jars: dict[Jar, Path]) -> Archive | None:
    return find_archive(NESSIE, bundled_java(), [jars[NESSIE_SERVER]])


def _quote_java_option(option: str) -> str:
    """Quote an option for `--driver-java-options`, which Spark divides at spaces."""
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _spark_archive(jars: dict[Jar, Path], java: Path | None = None) -> Archive | None:
    own_jars = sorted((spark_home() / "jars").glob("*.jar"))
    return find_archive(SPARK, java or user_java(), [*_spark_jars(jars), *own_jars])


def catalog_conf(settings: Settings, nessie_uri: str, *, ref: str = "main") -> dict[str, str]:
    """Return the Spark settings of the catalog `nessie` at `ref`, without secrets.

    At `name@hash` the catalog is read-only. The catalog's cache is off, because it hides commits of other
    writers (projectnessie/nessie#2165).
    """
    prefix = "spark.sql.catalog.nessie"
    name, _, hash_ = ref.partition("@")
    conf = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.session.timeZone": "UTC",
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        f"{prefix}.type": "nessie",
        f"{prefix}.uri": nessie_uri,
        f"{prefix}.ref": name,
        f"{prefix}.warehouse": settings.warehouse_uri,
        f"{prefix}.cache-enabled": "false",
    }
    if hash_:
        conf[f"{prefix}.ref.hash"] = hash_
    if settings.warehouse_uri.startswith("s3"):
        conf |= {
            f"{prefix}.io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            f"{prefix}.client.region": settings.s3_region,
        }
        if settings.s3_endpoint:
            conf |= {f"{prefix}.s3.endpoint": settings.s3_endpoint, f"{prefix}.s3.path-style-access": "true"}
    return conf


def s3_environment(settings: Settings) -> dict[str, str]:
    """Return the S3 credentials as environment variables of the Spark server; {} if the settings have none.

    Command lines and logs do not show environment variables.
    """
    if not (settings.s3_access_key_id and settings.s3_secret_access_key):
        return {}
    return {
        "AWS_ACCESS_KEY_ID": settings.s3_access_key_id.get_secret_value(),
        "AWS_SECRET_ACCESS_KEY": settings.s3_secret_access_key.get_secret_value(),
        "AWS_REGION": settings.s3_region,
    }


def _nessie_answers(port: int) -> bool:
    try:
        answer = requests.get(f"http://{LOOPBACK}:{port}/api/v2/config", timeout=1.0)
        return answer.ok or answer.status_code == requests.codes.unauthorized
    except requests.RequestException:
        return False


def _listens_within(record: ProcessRecord, timeout_s: float) -> bool:
    """Return whether the recorded process accepts connections on its port within `timeout_s` seconds.

    False at once if the process ends.
    """
    holds_within(timeout_s, lambda: process.is_listening(record.port) or not record.is_alive(), every_s=0.1)
    return record.is_alive() and process.is_listening(record.port)
